"""Chat requests of a given size, like those of people who talk on and on: a system prompt that many share, then turns.

Pure. A body is made once and sent many times, with a number of its own each time, so that no two prompts are the same.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

MODEL = "tiny"
PER_SIZE = 24
"""Different conversations of a size."""
_SYSTEM_PROMPTS = 3
_SYSTEM_SHARE = 0.25
_TURN_CHARS = 1500
_NUMBER = "000000000000"
"""What is replaced by the request's number. It stands in the last question, where real prompts differ."""
_WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they you were "
    "their one all we can her has there been if more when will would who so no out up into them then some could time these two "
    'may first any my now such like our over man me even most made after also did many before must through years where "your" '
    "way well down should because each just those people how too little state good very make world still own see men work long "
    "get here between both life being under never day same another know while last might us great old year off come since "
    "against go came right used take three naïve café → résumé `code` {x: 1} f(x)=2\\n"
).split()


@dataclass(frozen=True)
class Body:
    """A request body around the place of its number."""

    head: bytes
    tail: bytes

    def numbered(self, number: int) -> bytes:
        """The whole body, ``len(self)`` bytes."""
        return b"%b%012d%b" % (self.head, number, self.tail)

    def __len__(self) -> int:
        return len(self.head) + len(_NUMBER) + len(self.tail)


def bodies(size_bytes: int, *, stream: bool = False, max_tokens: int = 340, count: int = PER_SIZE) -> list[Body]:
    """``count`` conversations whose bodies have ``size_bytes`` each. Raises ValueError if that is under 2,000."""
    if size_bytes < 2_000:
        raise ValueError(f"{size_bytes} bytes are too few for a conversation")
    systems = [_text(random.Random(f"system {n}"), round(size_bytes * _SYSTEM_SHARE)) for n in range(_SYSTEM_PROMPTS)]  # noqa: S311
    return [_body(size_bytes, systems[n % len(systems)], n, stream=stream, max_tokens=max_tokens) for n in range(count)]


def _body(size_bytes: int, system: str, number: int, *, stream: bool, max_tokens: int) -> Body:
    chance = random.Random(f"conversation {number}")  # noqa: S311
    turns = [{"role": "system", "content": system}]
    question = f"Question {_NUMBER}: "
    while (left := size_bytes - len(_encode(turns, question, stream, max_tokens))) > 2 * _TURN_CHARS:
        role = "user" if len(turns) % 2 else "assistant"
        turns.append({"role": role, "content": _text(chance, min(left - _TURN_CHARS, _TURN_CHARS))})
    question += _text(chance, left)
    excess = len(_encode(turns, question, stream, max_tokens)) - size_bytes
    # Spaces make up for what escapes and characters of several bytes have taken or given.
    while excess > 0:
        question = question[:-1]
        excess = len(_encode(turns, question, stream, max_tokens)) - size_bytes
    head, _, tail = _encode(turns, question + " " * -excess, stream, max_tokens).partition(_NUMBER.encode())
    return Body(head, tail)


def _encode(turns: list[dict[str, str]], question: str, stream: bool, max_tokens: int) -> bytes:
    tree = {
        "model": MODEL,
        "messages": [*turns, {"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "top_p": 0.95,
        "stream": stream,
    }
    return json.dumps(tree, ensure_ascii=False).encode()


def _text(chance: random.Random, size_chars: int) -> str:
    words = chance.choices(_WORDS, k=size_chars // 2 + 8)
    return " ".join(words)[:size_chars].replace("\\n", "\n")
