"""What is asked of every arrangement, by a seed: streams that are written all the time, and long prompts that come in between.

Pure. Prompts are token ids drawn at random: their length is exact with any model, and no cache holds a part of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_IDS = range(1_000, 30_000)
"""Token ids that every model of today has, without its special ones."""
_JITTER = 0.25
"""Long prompts come up to this share of ``every_s`` early or late: at a fixed beat they could fall in step with the streams."""
_PLACES = 10_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes of one round."""

    streams: int
    """At once; as one ends, the next begins in its place."""
    stream_prompt_tokens: int
    stream_tokens: int
    prompt_tokens: int
    """Of a long prompt."""
    prompt_answer_tokens: int
    every_s: float
    """From one long prompt to the next, in the mean."""
    quiet_s: float
    """Streams alone, before the first long prompt."""
    window_s: float
    """All of it. It lasts longer where long prompts are not answered by then."""
    chunk_tokens: int
    """Tokens of a step with chunked prefill."""

    @property
    def prompts(self) -> int:
        """Long prompts of a round. The last one comes early enough to be answered in the window, if it takes ``every_s``."""
        return max(1, int((self.window_s - self.quiet_s) / self.every_s + 1e-9))

    @property
    def longest_tokens(self) -> int:
        """Of a request, with its answer."""
        return max(self.prompt_tokens + self.prompt_answer_tokens, self.stream_prompt_tokens + self.stream_tokens)


LOADS = {
    "cpu": Load(
        streams=4,
        stream_prompt_tokens=32,
        stream_tokens=64,
        prompt_tokens=768,
        prompt_answer_tokens=4,
        every_s=5.0,
        quiet_s=4.0,
        window_s=24.0,
        chunk_tokens=64,
    ),
    "gpu": Load(
        streams=32,
        stream_prompt_tokens=128,
        stream_tokens=256,
        prompt_tokens=6_000,
        prompt_answer_tokens=16,
        every_s=1.0,
        quiet_s=5.0,
        window_s=25.0,
        chunk_tokens=512,
    ),
    "sim": Load(
        streams=8,
        stream_prompt_tokens=128,
        stream_tokens=200,
        prompt_tokens=16_000,
        prompt_answer_tokens=16,
        every_s=2.5,
        quiet_s=3.0,
        window_s=13.0,
        chunk_tokens=1_024,
    ),
}
"""By what the workers run on."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    answer_tokens: int


class Script:
    """The requests of one round: the same for every arrangement."""

    def __init__(self, load: Load, seed: int, number: int) -> None:
        self.load = load
        self._name = f"{seed}/{number}"
        draw = random.Random(f"{self._name}/due")  # noqa: S311  (nothing is hidden by it)
        step_s = load.every_s
        self.due_s = [
            load.quiet_s + step_s * (index + (draw.uniform(-_JITTER, _JITTER) if index else 0.0))
            for index in range(load.prompts)
        ]
        """When each long prompt comes, from the beginning of the round."""
        self.prompts = [
            Ask(self._ids(f"prompt/{index}", load.prompt_tokens), load.prompt_answer_tokens) for index in range(load.prompts)
        ]

    def begins_s(self, place: int) -> float:
        """When the first stream of a place begins: spread over half of the quiet time, so that they do not end together."""
        return self.load.quiet_s / 2 * place / self.load.streams

    def streams(self, place: int) -> Iterator[Ask]:
        """The streams of a place, one after the other. The first ones are shorter by the place: ends are spread as well."""
        load = self.load
        for number in range(_PLACES):
            tokens = load.stream_tokens
            if number == 0:
                tokens = max(2, tokens * (place + 1) // load.streams)
            yield Ask(self._ids(f"stream/{place}/{number}", load.stream_prompt_tokens), tokens)

    def warm_up(self) -> Iterator[Ask]:
        """Long prompts that are in no round. None comes twice: of one that a worker has had, nothing would be handed over."""
        for number in range(_PLACES):
            yield Ask(self._ids(f"warm-up/{number}", self.load.prompt_tokens), self.load.prompt_answer_tokens)

    def _ids(self, purpose: str, count: int) -> tuple[int, ...]:
        draw = random.Random(f"{self._name}/{purpose}")  # noqa: S311
        return tuple(draw.choices(_IDS, k=count))


def changed(load: Load, changes: Mapping[str, Any]) -> Load:
    """With what was given in place of the defaults. Raises ValueError, which names the field."""
    made = replace(load, **{name: value for name, value in changes.items() if value is not None})
    for name, least in (
        ("streams", 1),
        ("stream_prompt_tokens", 1),
        ("stream_tokens", 2),
        ("prompt_tokens", 2),
        ("prompt_answer_tokens", 1),
        ("chunk_tokens", 16),
    ):
        if getattr(made, name) < least:
            raise ValueError(f"{name}: {getattr(made, name)} is less than {least}")
    for name in ("every_s", "quiet_s"):
        if not getattr(made, name) > 0:
            raise ValueError(f"{name}: {getattr(made, name):g} is not above 0")
    if made.window_s < made.quiet_s + made.every_s:
        raise ValueError(
            f"window_s: in {made.window_s:g} s no long prompt comes, {made.quiet_s:g} s of which are quiet, "
            f"with {made.every_s:g} s for each"
        )
    if made.chunk_tokens >= made.prompt_tokens:
        raise ValueError(f"chunk_tokens: {made.chunk_tokens} do not cut a prompt of {made.prompt_tokens} tokens")
    return made
