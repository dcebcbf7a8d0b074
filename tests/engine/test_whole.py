"""What one handoff cannot serve goes whole to the decode worker: the answer is that of one worker, the other is not asked."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.config import load
from tests.engine.kv_proof import KvUse, kv_use, kv_use_since
from tests.engine.metrics import Samples, kv_usage, scrape
from tests.engine.openai_api import Answer, Endpoint, Prompt, ask
from tests.engine.system import System, forget_prefixes

PROMPT = " ".join(f"Cart {number} holds {number * 29 % 83} sacks." for number in range(15))
OTHER = "And who counts them?"
SEVERAL = {"n": 2, "temperature": 1.0, "seed": 11}

LOGPROBS_S = 120.0
"""An engine compiles what it needs for log probabilities of a prompt at the first request for them."""

Case = tuple[str, Endpoint, Prompt, dict[str, Any]]
STREAMABLE: dict[str, Case] = {
    "n, chat": ("n", "chat", PROMPT, SEVERAL),
    "n, completions": ("n", "completions", PROMPT, SEVERAL),
    "list of texts": ("prompt_list", "completions", [PROMPT, OTHER], {}),
    "list of token lists": ("prompt_list", "completions", [[7, 8, 9] * 20, [9, 8, 7] * 15], {}),
    "echo and logprobs": ("echo", "completions", PROMPT, {"echo": True, "logprobs": 2}),
    "echo": ("echo", "completions", PROMPT, {"echo": True}),
    "echo, chat": ("echo", "chat", PROMPT, {"echo": True}),
}
NOT_STREAMABLE: dict[str, Case] = {
    "prompt_logprobs": ("prompt_logprobs", "completions", PROMPT, {"prompt_logprobs": 1}),
    "prompt_logprobs, chat": ("prompt_logprobs", "chat", PROMPT, {"prompt_logprobs": 1}),
    "beam search": ("beam_search", "completions", PROMPT, {"use_beam_search": True}),
    "one token": ("one_token", "chat", PROMPT, {"max_tokens": 1}),
}
CASES = STREAMABLE | NOT_STREAMABLE
EVERY_CASE = pytest.mark.parametrize(
    ("case", "stream"),
    [
        *(pytest.param(case, False, id=f"{name}, whole") for name, case in CASES.items()),
        *(pytest.param(case, True, id=f"{name}, stream") for name, case in STREAMABLE.items()),
    ],
)


def filter_metrics(system: System) -> Samples:
    return scrape(f"http://{load(system.log.parent / 'baton.yaml').admin}")


@EVERY_CASE
def test_it_is_answered_as_by_one_worker(system: System, case: Case, stream: bool) -> None:
    reason, endpoint, prompt, extra = case
    expected = ask(system.prefill_url, endpoint, prompt, **extra, timeout_s=LOGPROBS_S)
    forget_prefixes(system.prefill_url, system.decode_url)
    before = filter_metrics(system)
    prefill_before, decode_before = kv_use(system.prefill_url), kv_use(system.decode_url)

    answer = ask(system.front_url, endpoint, prompt, stream=stream, **extra, timeout_s=LOGPROBS_S)

    assert answer == expected
    assert len(set(answer.texts)) == (2 if reason in ("n", "prompt_list") else 1)
    if not stream:
        assert logprobs_of(answer) == logprobs_of(expected)
        assert all(logprobs_of(answer)) or not extra.keys() & {"logprobs", "prompt_logprobs"}
    use = kv_use_since(system.decode_url, decode_before, prompt_tokens=1)
    assert use.transfers == use.external_tokens == 0
    assert use.computed_tokens > 0
    assert kv_use(system.prefill_url) - prefill_before == KvUse()
    assert kv_usage(system.prefill_url) == 0
    after = filter_metrics(system)
    assert whole(after, reason=reason) - whole(before, reason=reason) == 1
    assert whole(after) - whole(before) == 1
    assert after.total("baton_handoffs_total") == before.total("baton_handoffs_total")


def whole(metrics: Samples, **labels: str) -> float:
    return metrics.total("baton_whole_requests_total", **labels)


def logprobs_of(answer: Answer) -> list[Any]:
    """Those of the prompt and of the answer, without the last digits, in which two workers may differ."""
    (body,) = answer.raw
    names = ("logprobs", "prompt_logprobs")
    found = [
        next((holder[name] for name in names for holder in (choice, body) if holder.get(name)), None)
        for choice in body["choices"]
    ]
    return rounded(found)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
