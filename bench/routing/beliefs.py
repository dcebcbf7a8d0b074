"""What a filter expected the prefill workers to hold of the prompts, and what their answers say they held, from its metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp

_SAMPLE = re.compile(r"^(baton_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BY = re.compile(r'(?:by|reason)="(\w+)"')


@dataclass(frozen=True)
class Beliefs:
    """Of one filter, or of several together."""

    prompt_tokens: int = 0
    """Of the prompts that prefill workers answered."""
    expected_tokens: int = 0
    """Of these, expected in their caches."""
    found_tokens: int = 0
    """Of these, that were there."""
    by: dict[str, int] = field(default_factory=dict)
    """Prompts by whose word counted; empty for a filter that hears no events."""
    without_tokens: dict[str, int] = field(default_factory=dict)
    """Prompts without token ids by reason."""

    def __str__(self) -> str:
        shown = (
            f"prefill caches held {self.found_tokens:,} of {self.prompt_tokens:,} prompt tokens, expected were "
            f"{self.expected_tokens:,}"
        )
        for what, counts in (("prompts by whose word counted", self.by), ("prompts without tokens", self.without_tokens)):
            if counts:
                shown += f"; {what}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}"
        return shown


def together(several: Iterable[Beliefs]) -> Beliefs:
    """Of several filters."""
    every = list(several)
    by, without = Counter[str](), Counter[str]()
    for each in every:
        by.update(each.by)
        without.update(each.without_tokens)
    return Beliefs(
        prompt_tokens=sum(each.prompt_tokens for each in every),
        expected_tokens=sum(each.expected_tokens for each in every),
        found_tokens=sum(each.found_tokens for each in every),
        by=dict(by),
        without_tokens=dict(without),
    )


async def beliefs(http: aiohttp.ClientSession, admin: str) -> Beliefs:
    """Ask a filter for them."""
    async with http.get(f"http://{admin}/metrics") as response:
        return parse(await response.text())


def parse(text: str) -> Beliefs:
    """From the text of its ``/metrics``."""
    plain, by, without = Counter[str](), Counter[str](), Counter[str]()
    for name, labels, value in _SAMPLE.findall(text):
        kind = _BY.search(labels)
        if name == "baton_cache_lookups_total" and kind and float(value):
            by[kind[1]] += int(float(value))
        elif name == "baton_token_chain_missing_total" and kind and float(value):
            without[kind[1]] += int(float(value))
        elif name.startswith("baton_prefix_") and name.endswith("_tokens_total"):
            plain[name] += int(float(value))
    return Beliefs(
        prompt_tokens=plain["baton_prefix_prompt_tokens_total"],
        expected_tokens=plain["baton_prefix_predicted_tokens_total"],
        found_tokens=plain["baton_prefix_reported_tokens_total"],
        by=dict(by),
        without_tokens=dict(without),
    )
