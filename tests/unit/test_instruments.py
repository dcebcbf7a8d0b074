"""Our own counters and histograms say what the library's would, and stay bounded."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.observe.instruments import Bounded, Spread, Tally
from extproc.observe.own_time import PARSE, PHASES, PREFILL_CALL, OwnTime


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_histogram_is_written_as_the_library_writes_it() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (0.005, 0.01, 0.25, 1, 10)
    spread = Spread(ours, "h", "x", ("role",), bounds=bounds)
    reference = Histogram("h", "x", ["role"], buckets=bounds, registry=theirs)
    child = spread.child("decode")
    for number, value in enumerate((0, 0.005, 0.0050001, 0.2, 1, 9.99, 10, 11)):
        if number % 2:
            child(value)
        else:
            spread.observe(value, "decode")
        reference.labels("decode").observe(value)
    expected = {key: value for key, value in samples(theirs).items() if not key[0].endswith("_created")}
    assert samples(ours) == pytest.approx(expected)


def test_buckets_of_others_go_where_all_of_them_fits() -> None:
    registry = CollectorRegistry()
    spread = Spread(registry, "h", "x", bounds=(1, 2, 4))
    spread.add({0.5: 3, 2: 2, 3: 1, float("inf"): 1}, 17.0)
    said = samples(registry)
    by_bound = [said["h_bucket", (("le", bound),)] for bound in ("1.0", "2.0", "4.0", "+Inf")]
    assert by_bound == [3, 5, 6, 7]
    assert said["h_sum", ()] == 17


def test_known_values_are_there_from_the_start() -> None:
    registry = CollectorRegistry()
    Tally(registry, "c", "x", ("kind",), known=[("retry",), ("stale",)])
    assert samples(registry) == {("c_total", (("kind", "retry"),)): 0, ("c_total", (("kind", "stale"),)): 0}


def test_a_counter_without_labels_starts_at_zero() -> None:
    registry = CollectorRegistry()
    tally = Tally(registry, "c", "x")
    assert samples(registry) == {("c_total", ()): 0}
    tally.inc(by=2.5)
    assert tally.value() == 2.5


def test_labels_that_do_not_fit_are_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="labels"):
        Tally(CollectorRegistry(), "c", "x", ("one",)).inc("a", "b")
    with pytest.raises(ValueError, match="labels"):
        Spread(CollectorRegistry(), "h", "x", ("one",), bounds=(1,)).observe(1.0)


def test_a_series_too_many_is_counted_as_other_and_nothing_is_lost() -> None:
    registry = CollectorRegistry()
    tally = Tally(registry, "c", "x", ("who",), limit=3)
    for number in range(10):
        tally.inc(f"w{number}")
    said = samples(registry)
    assert len(said) == 4
    assert said["c_total", (("who", "other"),)] == 7
    assert sum(said.values()) == 10


def test_a_worker_that_went_takes_its_series_along() -> None:
    registry = CollectorRegistry()
    tally = Tally(registry, "c", "x", ("role", "endpoint"))
    for role, endpoint in (("prefill", "a"), ("decode", "a"), ("decode", "b")):
        tally.inc(role, endpoint)
    tally.forget("endpoint", "a")
    assert samples(registry) == {("c_total", (("endpoint", "b"), ("role", "decode"))): 1}


def test_names_that_others_choose_are_the_first_ones_and_other() -> None:
    names = Bounded(2)
    assert [names.of(name) for name in ("a", "b", "c", "a", "", "d")] == ["a", "b", "other", "a", "-", "other"]


def test_text_that_would_break_the_format_is_escaped() -> None:
    registry = CollectorRegistry()
    Tally(registry, "c", "x", ("who",)).inc('a"} 7\n# é\\')
    assert samples(registry) == {("c_total", (("who", 'a"} 7\n# é\\'),)): 1}


async def test_own_time_is_that_of_the_steps_and_goes_to_the_phase_it_was_spent_in() -> None:
    now_s = 0.0
    own = OwnTime(lambda: now_s)

    def compute(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(compute, 1000.0)  # somebody else's time
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def call() -> str:
        compute(4)
        await wait()
        compute(5)
        return "done"

    async def work() -> str:
        compute(1)
        own.enter(PARSE)
        compute(2)
        await wait()
        compute(3)
        own.enter(PREFILL_CALL)
        return await asyncio.ensure_future(own.of(call()))

    assert await own.of(work()) == "done"
    assert dict(zip(PHASES, own.spent_s, strict=True)) == {
        **dict.fromkeys(PHASES, 0.0),
        "headers": 1,
        "parse": 5,
        "prefill_call": 9,
    }


async def test_own_time_passes_on_errors_and_cancellation() -> None:
    own = OwnTime()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await own.of(fails())
    cleaned: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append("up")
            raise

    task = asyncio.ensure_future(own.of(waits()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["up"], "its own clean-up ran, waits included"

    async def swallows() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return ""

    assert await own.of(swallows()) == "timed out", "a timeout inside is the work's own business"
