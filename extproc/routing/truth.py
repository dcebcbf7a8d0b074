"""What workers were expected to hold against what their engines found, prompt by prompt. Pure.

A reply corrects nothing by itself: the prompt that it is of has just been computed, and is held now whatever was there before.
But a worker that is wrong many times in a row has lost or misread events, and its own word is to be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from extproc.routing.hits import Source

IN_A_ROW = 8
"""Wrong so many times one after the other, and a worker's word is not believed any more."""

_SLACK_SHARE = 0.05
_SLACK_TOKENS = 256
"""What is off by less than both is not wrong: blocks are evicted and stored between a decision and its prefill."""


class Check(NamedTuple):
    """One prompt."""

    source: Source
    prompt_tokens: int
    expected_tokens: int
    found_tokens: int
    stored_tokens: int = 0
    """Expected in its cache server, whatever its own caches hold besides."""

    @property
    def error_share(self) -> float:
        """Of the prompt, 0 to 1."""
        return min(1.0, abs(self.expected_tokens - self.found_tokens) / max(self.prompt_tokens, 1))

    @property
    def wrong(self) -> bool:
        """Whether that is more than time explains."""
        return abs(self.expected_tokens - self.found_tokens) > self._slack_tokens

    @property
    def telling(self) -> bool:
        """Whether it shows anything: where nothing was expected and nothing found, whoever forgot everything would be right."""
        return max(self.expected_tokens, self.found_tokens) > self._slack_tokens

    @property
    def _slack_tokens(self) -> float:
        return max(_SLACK_TOKENS, _SLACK_SHARE * self.prompt_tokens)


class Truth:
    """Counts who is wrong."""

    def __init__(self) -> None:
        self._wrong: dict[str, int] = {}
        self.on_mistrust: Callable[[str], None] = lambda _address: None
        """Told of a worker whose events do not say what it holds, each time that is found: everything is to be asked anew."""
        self.mistrusted = 0
        """How often."""

    def note(self, address: str, check: Check) -> None:
        """A prompt was computed at ``address``."""
        if check.source != "events" or not check.telling:
            return
        if not check.wrong:
            self._wrong.pop(address, None)
            return
        count = self._wrong[address] = self._wrong.get(address, 0) + 1
        if count >= IN_A_ROW:
            del self._wrong[address]
            self.mistrusted += 1
            self.on_mistrust(address)

    def forget(self, address: str) -> None:
        """The worker is gone, or its engine is a new one."""
        self._wrong.pop(address, None)
