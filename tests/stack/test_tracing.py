"""Traces: one of each request, from the client's context through Envoy and the filter to both workers, and no harm ever."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.stack.collector import Collector, Span
from tests.stack.harness import Stack
from workers.ready import free_ports

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])")
CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
PROMPT = b'{"model":"m","prompt":"a secret prompt","max_tokens":4}'


@pytest_asyncio.fixture(loop_scope="session")
async def collector() -> AsyncIterator[Collector]:
    async with Collector(*free_ports(2)) as running:
        yield running


@asynccontextmanager
async def traced(endpoint: str, *, prefill: int = 1, **tracing: Any) -> AsyncIterator[Stack]:
    settings: dict[str, Any] = {"tracing": {"endpoint": endpoint, "interval_s": 0.05, **tracing}}
    async with Stack(prefill=prefill, decode=1, settings=settings) as stack:
        yield stack


async def ask(stack: Stack, path: str = "/v1/completions", body: bytes = PROMPT, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with stack.http.post(path, data=body, headers={"content-type": "application/json", **named}) as response:
        await response.read()
        return response.status


def contexts(stack: Stack) -> list[tuple[str, str, str]]:
    """(trace, span, flags) that the prefill and the decode worker got with the last request."""
    found = [TRACEPARENT.fullmatch(worker.last.headers["traceparent"]) for worker in (stack.prefill[0], stack.decode[0])]
    return [match.groups() for match in found if match is not None]  # type: ignore[misc]


def by_name(spans: list[Span], service: str = "baton") -> dict[str, Span]:
    return {span.name: span for span in spans if span.service == service}


async def test_one_trace_has_envoy_the_filter_and_both_workers(collector: Collector) -> None:
    async with traced(collector.grpc_endpoint) as stack:
        assert await ask(stack, x_request_id="look-here") == 200
        (prefill_trace, prefill_parent, prefill_flags), (decode_trace, decode_parent, decode_flags) = contexts(stack)
        assert prefill_trace == decode_trace and prefill_flags == decode_flags == "01"
        await collector.until(5)
        await collector.until(2, service="baton-envoy")
        await asyncio.sleep(0.3)
        spans = collector.of_trace(prefill_trace)
        ours = by_name(spans)
        assert set(ours) == {"text_completion m", "parse", "decide", "prefill", "decode"}
        root = ours["text_completion m"]
        assert all(span.parent == root.id for span in ours.values() if span is not root)
        assert prefill_parent == ours["prefill"].id, "the prefill worker's spans hang on our call to it"

        envoys = {span.id: span for span in spans if span.service == "baton-envoy"}
        assert root.parent in envoys, "our span hangs on Envoy's"
        (first,) = [span for span in envoys.values() if not span.parent]
        assert first.kind == "SPAN_KIND_SERVER"
        assert decode_parent in envoys, "the decode worker's spans hang on Envoy's request to it"
        assert envoys[decode_parent].parent == first.id

        said = root.attributes
        assert said["baton.request_id"] == "look-here" and said["baton.policy"] == "default"
        assert said["baton.mode"] == "disaggregate" and said["baton.outcome"] == "handoff"
        assert said["baton.prefill"] == stack.prefill[0].address and said["baton.decode"] == stack.decode[0].address
        assert said["gen_ai.operation.name"] == "text_completion" and said["gen_ai.request.model"] == "m"
        assert said["gen_ai.usage.input_tokens"] == 334 and said["http.response.status_code"] == 200
        assert ours["decide"].attributes["baton.reason"] == "policy"
        assert ours["prefill"].attributes["server.address"] == stack.prefill[0].address
        assert ours["prefill"].attributes["baton.worker_request_id"] == stack.prefill[0].last.headers["x-request-id"]
        assert ours["decode"].events == ["answer begins"]
        assert not any(span.failed for span in spans)
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in ours.values())
        assert "secret" not in repr(spans)


async def test_a_clients_trace_is_continued(collector: Collector) -> None:
    async with traced(collector.grpc_endpoint, sample_ratio=0.0) as stack:
        assert await ask(stack, traceparent=f"{CLIENTS}-01", tracestate="a=b") == 200
        assert {trace for trace, _, _ in contexts(stack)} == {CLIENTS[3:35]}
        assert all(worker.last.headers["tracestate"] == "a=b" for worker in (*stack.prefill, *stack.decode))
        await collector.until(5)
        assert {span.trace for span in collector.spans} == {CLIENTS[3:35]}, "although nothing is sampled otherwise"


@pytest.mark.parametrize("envoy", [True, False])
async def test_who_says_not_sampled_is_not_and_both_legs_are_told(collector: Collector, envoy: bool) -> None:
    async with traced(collector.grpc_endpoint, envoy=envoy) as stack:
        assert await ask(stack, traceparent=f"{CLIENTS}-00") == 200
        assert [(trace, flags) for trace, _, flags in contexts(stack)] == [(CLIENTS[3:35], "00")] * 2
        assert await ask(stack) == 200
        await collector.until(5)
        assert CLIENTS[3:35] not in {span.trace for span in collector.spans}


async def test_with_ratio_0_the_workers_are_told_not_to_sample_either(collector: Collector) -> None:
    async with traced(collector.grpc_endpoint, sample_ratio=0.0, envoy=False) as stack:
        assert await ask(stack) == 200
        (first, _, flags), (second, _, others) = contexts(stack)
        assert first == second and flags == others == "00"
        await asyncio.sleep(0.3)
        assert collector.spans == []


async def test_without_envoys_part_the_decode_leg_hangs_on_our_span(collector: Collector) -> None:
    async with traced(collector.grpc_endpoint, envoy=False) as stack:
        assert await ask(stack, traceparent=f"{CLIENTS}-01") == 200
        ours = by_name(await collector.until(5))
        assert ours["text_completion m"].parent == CLIENTS[36:52]
        assert [parent for _, parent, _ in contexts(stack)] == [ours["prefill"].id, ours["decode"].id]


async def test_clients_contexts_can_be_ignored(collector: Collector) -> None:
    async with traced(collector.grpc_endpoint, from_clients="ignore", sample_ratio=0.0) as stack:
        assert await ask(stack, traceparent=f"{CLIENTS}-01") == 200
        assert all(trace != CLIENTS[3:35] and flags == "00" for trace, _, flags in contexts(stack))


async def test_spans_go_over_http_with_the_headers_of_the_secret_file(collector: Collector, tmp_path: Any) -> None:
    keys = tmp_path / "headers"
    keys.write_text("x-api-key: s3cret\n\nX-Other:  two words \n")
    async with traced(collector.http_endpoint, protocol="http", envoy=False, headers_file=str(keys)) as stack:
        assert await ask(stack) == 200
        await collector.until(5)
        assert collector.headers[0]["x-api-key"] == "s3cret" and collector.headers[0]["x-other"] == "two words"
        assert "s3cret" not in stack.filter.log.read_text()


async def test_envoy_sends_over_http_as_well(collector: Collector) -> None:
    async with traced(collector.http_endpoint, protocol="http") as stack:
        assert await ask(stack, "/v1/completions?api_key=s3cret") == 200
        spans = await collector.until(1, service="baton-envoy")
        await collector.until(5)
        assert "s3cret" not in repr(collector.spans), "queries are no part of a span"
        assert any(span.attributes.get("http.url") == "/v1/completions" for span in spans)


async def test_errors_and_other_requests(collector: Collector) -> None:
    async def fails(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=500)

    async with traced(collector.grpc_endpoint, prefill=2, envoy=False) as stack:
        for worker in stack.prefill:
            worker.answer = fails
        assert await ask(stack) == 502
        spans = await collector.until(1, name="text_completion m")
        await collector.until(2, name="prefill")
        assert spans[0].failed and spans[0].attributes["error.type"] == "prefill_failed"
        calls = [span for span in collector.spans if span.name == "prefill"]
        assert len(calls) == 2 and all(call.failed and call.attributes["error.type"] == "prefill_failed" for call in calls)
        assert {call.attributes["server.address"] for call in calls} == {worker.address for worker in stack.prefill}

        assert await ask(stack, body=b'{"model":"m","prompt":"a secret') == 400
        async with stack.http.get("/version") as response:
            assert response.status == 200
        (other,) = await collector.until(1, name="request")
        assert other.attributes["http.route"] == "/version" and other.attributes["baton.outcome"] == "whole"
        assert TRACEPARENT.fullmatch(stack.decode[0].last.headers["traceparent"])
        mistakes = [span for span in collector.spans if span.attributes.get("http.response.status_code") == 400]
        assert len(mistakes) == 1 and not mistakes[0].failed, "a client's mistake is no fault of ours"
        assert "secret" not in repr(collector.spans)


async def counted(stack: Stack, outcome: str) -> float:
    return (await stack.metrics())[f'baton_trace_spans_total{{outcome="{outcome}"}}']


@pytest.mark.parametrize("fault", ["nobody", "hangs", "never_answers"])
async def test_a_collector_that_is_away_or_hangs_harms_no_request_and_what_is_lost_is_counted(
    collector: Collector, fault: str
) -> None:
    """Nor does it hold up the end of the process."""
    deaf = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
    collector.hang = True
    endpoint = {
        "nobody": f"http://127.0.0.1:{free_ports(1)[0]}",
        "hangs": collector.grpc_endpoint,
        "never_answers": f"http://127.0.0.1:{deaf.getsockname()[1]}",
    }[fault]
    try:
        async with traced(endpoint, timeout_s=1.0, max_queued_spans=20, envoy=False) as stack:
            for _ in range(12):
                assert await ask(stack) == 200
            async with asyncio.timeout(10):
                while not (await counted(stack, "dropped") and await counted(stack, "failed")):
                    assert await ask(stack) == 200
            assert await counted(stack, "exported") == 0
            await stack.logged("spans_lost")
            for _ in range(3):
                assert await ask(stack) == 200  # something waits again
            began = time.monotonic()
            stack.signal_filter(signal.SIGTERM)
            async with asyncio.timeout(20):
                while stack.filter.poll() is None:
                    await asyncio.sleep(0.02)
            # The drain's delay is half a second; the rest is what the last spans and the interpreter take.
            assert stack.filter.poll() == 0 and time.monotonic() - began < 6.0
    finally:
        deaf.close()


async def test_off_nothing_is_added_and_the_library_is_not_even_loaded(stack: Stack) -> None:
    assert await ask(stack) == 200
    assert all("traceparent" not in worker.last.headers for worker in (stack.prefill[0], *stack.decode) if worker.received)
    code = "import sys, extproc.server, extproc.cli; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert json.loads(out.decode().replace("'", '"')) == []
