"""No prefill to be had: the decode worker does it all, where the configuration says so, and the answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine.front import Front, front
from tests.engine.kv_proof import KvUse, assert_kv_moved, block_bytes, kv_use, kv_use_since
from tests.engine.metrics import kv_usage, until
from tests.engine.openai_api import Answer, Endpoint, ask
from tests.engine.relay import Relay, relay
from tests.engine.system import System, forget_prefixes
from workers.ready import free_ports

PROMPT = " ".join(f"Barge {number} is {number * 41 % 89} yards long." for number in range(15))
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ENDPOINT = pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
AGGREGATE = {"prefill": {"fallback": "aggregate"}}


@pytest.fixture(scope="module")
def dead(system: System) -> Iterator[Front]:
    """Nothing listens at the address of the prefill worker."""
    (port,) = free_ports(1)
    with front([f"127.0.0.1:{port}"], [system.decode_url.removeprefix("http://")], AGGREGATE, ready=False) as running:
        yield running


@pytest.fixture(scope="module")
def failing(system: System) -> Iterator[tuple[Front, Relay]]:
    """A prefill worker that looks well and fails as told."""
    with ExitStack() as parts:
        prefill = parts.enter_context(relay(system.prefill_url))
        decode = system.decode_url.removeprefix("http://")
        yield parts.enter_context(front([prefill.address], [decode], AGGREGATE)), prefill


def cold(system: System, endpoint: Endpoint) -> Answer:
    """The answer of a worker asked directly; no worker has the prompt in its cache afterwards."""
    expected = ask(system.prefill_url, endpoint, PROMPT)
    assert expected.prompt_tokens > 100
    forget_prefixes(system.prefill_url, system.decode_url)
    return expected


def assert_aggregated(running: Front, reason: str, answer: Answer, use: KvUse, *, times: int) -> None:
    assert use == KvUse(computed_tokens=answer.prompt_tokens)
    assert "x-kv-transfer" not in answer.headers
    metrics = running.metrics()
    assert metrics.total("baton_fallbacks_total", kind="aggregate") == times
    assert metrics.total("baton_whole_requests_total", reason=reason) == times
    assert metrics.total("baton_handoffs_total") == metrics.total("baton_releases_total") == 0


@ENDPOINT
@STREAM
def test_a_prefill_worker_that_is_not_there(system: System, dead: Front, endpoint: Endpoint, stream: bool) -> None:
    expected = cold(system, endpoint)
    earlier = dead.metrics().total("baton_fallbacks_total", kind="aggregate")
    before = kv_use(system.decode_url)

    answer = ask(dead.url, endpoint, PROMPT, stream=stream)

    assert answer == expected
    use = kv_use_since(system.decode_url, before, prompt_tokens=expected.prompt_tokens)
    assert_aggregated(dead, "no_prefill_worker", answer, use, times=int(earlier) + 1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((500, b'{"error":{"message":"engine core died"}}'), "prefill_failed"),
        ((200, b'{"choices":[{"text":"x"}]}'), "handoff_invalid"),
        ((0, b""), "prefill_unreachable"),
    ],
    ids=["500", "no KV", "broken connection"],
)
def test_a_prefill_worker_that_fails(
    system: System, failing: tuple[Front, Relay], fault: tuple[int, bytes], reason: str
) -> None:
    running, prefill = failing
    expected = cold(system, "chat")
    earlier = running.metrics()
    before, prefill_before = kv_use(system.decode_url), kv_use(system.prefill_url)
    prefill.fault = fault
    prefill.exchanges.clear()

    answer = ask(running.url, "chat", PROMPT, stream=True)

    assert len(prefill.exchanges) == 1
    assert answer == expected
    use = kv_use_since(system.decode_url, before, prompt_tokens=expected.prompt_tokens)
    assert use == KvUse(computed_tokens=expected.prompt_tokens)
    assert "x-kv-transfer" not in answer.headers
    metrics = running.metrics()
    for name, labels in (("fallbacks", {"kind": "aggregate"}), ("whole_requests", {"reason": reason})):
        assert metrics.total(f"baton_{name}_total", **labels) - earlier.total(f"baton_{name}_total", **labels) == 1
    assert kv_use(system.prefill_url) == prefill_before


def test_a_prefill_worker_that_recovers_is_used_again(system: System, failing: tuple[Front, Relay], tiny_model: Path) -> None:
    running, prefill = failing
    expected = cold(system, "chat")
    prefill.fault = None
    before = kv_use(system.decode_url)

    answer = ask(running.url, "chat", PROMPT)

    assert answer == expected
    use = kv_use_since(system.decode_url, before, prompt_tokens=expected.prompt_tokens)
    assert_kv_moved(use, prompt_tokens=expected.prompt_tokens, block_size_bytes=block_bytes(tiny_model))


def test_another_prefill_worker_is_the_first_choice(system: System, tiny_model: Path) -> None:
    """A retry comes before the fallback: the KV of the second worker moves as it would from the first."""
    decode = system.decode_url.removeprefix("http://")
    with (
        relay(system.prefill_url) as bad,
        front([bad.address, system.prefill_url.removeprefix("http://")], [decode], AGGREGATE) as running,
    ):
        bad.fault = (500, b"{}")
        expected = cold(system, "completions")
        for _ in range(2):  # whichever has its turn first
            forget_prefixes(system.prefill_url, system.decode_url)
            before = kv_use(system.decode_url)
            assert ask(running.url, "completions", PROMPT) == expected
            use = kv_use_since(system.decode_url, before, prompt_tokens=expected.prompt_tokens)
            assert_kv_moved(use, prompt_tokens=expected.prompt_tokens, block_size_bytes=block_bytes(tiny_model))
        metrics = running.metrics()
        assert len(bad.exchanges) == metrics.total("baton_fallbacks_total", kind="retry") == 1
        assert metrics.total("baton_fallbacks_total", kind="aggregate") == 0
    until(lambda: kv_usage(system.prefill_url) == 0)
