"""What the simulated model answers: a pure function of the prompt's tokens, greedy and without a seed.

The engine feeds it with what its KV blocks really held (:mod:`workers.sim.blocks`), a test or a chaos run with what the prompt
was: if the blocks were right, both get the same text. No I/O here.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.sim import tokens

STATE_BYTES = 16
MEAN_ANSWER_TOKENS = 256

_WORDS = tuple(
    tokens.piece_id(f" {first}{vowel}{last}".encode())
    for first in "bcdfghjklmnprstv"
    for vowel in "aeiou"
    for last in "bcdfghjklmnprstv"
)
_WORDS_A_DIGEST = 32
_numbers = struct.Struct(f">{_WORDS_A_DIGEST}H").unpack


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes that states are made from: four a token, so that a slice of tokens is a slice of bytes."""
    return array("I", token_ids).tobytes()


def start_state(adapter: str = "") -> hashlib.blake2b:
    """The state before the first token. A LoRA adapter is another model: its KV and its answers differ."""
    return hashlib.blake2b(adapter.encode(), digest_size=STATE_BYTES)


def prompt_state(token_ids: Sequence[int], adapter: str = "") -> bytes:
    """The state after a prompt whose KV is right."""
    state = start_state(adapter)
    state.update(token_bytes(token_ids))
    return state.digest()


@dataclass(frozen=True)
class Stop:
    """When an answer ends."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    keep_string: bool = False
    """Leave the stop string in the text (include_stop_str_in_output)."""


class Step(NamedTuple):
    """One generated token."""

    token_id: int
    text: str
    """What became certain with it; text that may yet turn out to be a stop string is held back."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """The tokens that follow a state, one by one."""

    def __init__(self, state: bytes, stop: Stop, *, mean_tokens: int = MEAN_ANSWER_TOKENS, eos_first: bool = False) -> None:
        """``mean_tokens``: where EOS comes on average, between half and three halves of it; 0 means never."""
        self._state = state
        self._stop = stop
        self._words: tuple[int, ...] = ()
        self.count = 0
        self._text = ""
        self._sent = 0
        self._hold = 0 if stop.keep_string else max((len(s) for s in stop.strings), default=1) - 1
        self._eos_at: int | None = None
        if eos_first:
            self._eos_at = 0
        elif mean_tokens:
            self._eos_at = mean_tokens // 2 + int.from_bytes(state[:4], "big") % max(1, mean_tokens)

    def next(self) -> Step:
        """The next token. Not to be called after a finish reason was given."""
        stop, index = self._stop, self.count
        self.count = index + 1
        may_stop = self.count > stop.min_tokens
        if self._eos_at is not None and not stop.ignore_eos and may_stop and index >= self._eos_at:
            return Step(tokens.EOS, self._rest(), "stop")
        offset = index % _WORDS_A_DIGEST
        if not offset:
            digest = hashlib.blake2b(self._state + (index // _WORDS_A_DIGEST).to_bytes(4, "big"), digest_size=64).digest()
            self._words = tuple(_WORDS[number % len(_WORDS)] for number in _numbers(digest))
        token_id = self._words[offset]
        piece = tokens.piece_bytes(token_id).decode()
        if may_stop and token_id in stop.token_ids:
            return Step(token_id, self._rest(), "stop", token_id)
        if not stop.strings:
            return Step(token_id, piece, "length" if self.count >= stop.max_tokens else None)
        return self._with_stop_strings(token_id, piece, may_stop)

    def _with_stop_strings(self, token_id: int, piece: str, may_stop: bool) -> Step:
        stop = self._stop
        start = max(0, len(self._text) - max(map(len, stop.strings)) + 1)
        self._text += piece
        found = [(at, s) for s in stop.strings if s and (at := self._text.find(s, start)) >= 0] if may_stop else []
        if found:
            at, string = min(found)
            self._text = self._text[: at + len(string) if stop.keep_string else at]
            return Step(token_id, self._rest(), "stop", string)
        if self.count >= stop.max_tokens:
            return Step(token_id, self._rest(), "length")
        end = max(self._sent, len(self._text) - self._hold)
        text, self._sent = self._text[self._sent : end], end
        return Step(token_id, text)

    def _rest(self) -> str:
        text, self._sent = self._text[self._sent :], len(self._text)
        return text


def answer_steps(state: bytes, stop: Stop, *, mean_tokens: int = MEAN_ANSWER_TOKENS) -> list[Step]:
    """A whole answer."""
    answer = Answer(state, stop, mean_tokens=mean_tokens)
    steps = [answer.next()]
    while steps[-1].finish_reason is None:
        steps.append(answer.next())
    return steps


def expected_text(
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    *,
    adapter: str = "",
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    keep_stop_string: bool = False,
    mean_answer_tokens: int = MEAN_ANSWER_TOKENS,
) -> str:
    """The right answer to a prompt, without an engine."""
    rules = Stop(max_tokens, min_tokens, ignore_eos, tuple(stop), frozenset(stop_token_ids), keep_stop_string)
    steps = answer_steps(prompt_state(prompt_token_ids, adapter), rules, mean_tokens=mean_answer_tokens)
    return "".join(step.text for step in steps)
