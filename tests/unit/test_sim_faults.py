"""The simulated engine's failure switches, metrics and KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from workers.ready import free_ports
from workers.sim import hashing
from workers.sim.__main__ import parse
from workers.sim.api_control import control_app
from workers.sim.faults import REQUEST_KINDS, Fault, Faults
from workers.sim.histogram import Histogram
from workers.sim.local import running
from workers.sim.options import SimOptions, worker_options
from workers.sim.prompts import Model, expected_answer
from workers.sim.violations import Violations
from workers.sim.worker import Worker

OPTIONS = SimOptions(port=0, workers=2, speed=0, num_blocks=600, max_model_len=4096)
MODEL = Model(max_model_len=4096)
BODY: dict[str, Any] = {"prompt": "What is the time? " * 10, "max_tokens": 12, "ignore_eos": True}
PREFILL = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
PATH = "/v1/completions"


@pytest.fixture
async def pair() -> AsyncIterator[list[Worker]]:
    async with running(OPTIONS) as workers:
        yield workers


async def post(http: aiohttp.ClientSession, worker: Worker, body: object, path: str = PATH) -> tuple[int, Any]:
    async with http.post(worker.url + path, json=body) as response:
        return response.status, await response.json(content_type=None)


async def inject(http: aiohttp.ClientSession, worker: Worker, **fault: Any) -> None:
    assert (await post(http, worker, fault, "/sim/faults"))[0] == 200


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def right(http: aiohttp.ClientSession, worker: Worker) -> bool:
    status, answer = await post(http, worker, BODY)
    return status == 200 and answer["choices"][0]["text"] == expected_answer(PATH, BODY, MODEL)


def test_a_switch_hits_as_often_as_it_says_and_the_same_requests_for_the_same_seed() -> None:
    faults = Faults()
    faults.add(Fault(kind="status", phase="prefill", count=2), 0.0)
    hits = [faults.take(REQUEST_KINDS, phase, 0.0) for phase in ("decode", "prefill", "prefill", "prefill")]
    assert [hit is not None for hit in hits] == [False, True, True, False]
    runs = []
    for _ in range(2):
        faults = Faults()
        faults.add(Fault(kind="reset", probability=0.3, seed=7), 0.0)
        runs.append([faults.take(REQUEST_KINDS, "any", 0.0) is not None for _ in range(1000)])
    assert runs[0] == runs[1] and 250 < sum(runs[0]) < 350


def test_a_switch_ends_with_its_time() -> None:
    faults = Faults()
    faults.add(Fault(kind="slow", factor=4.0, duration_s=10.0), 100.0)
    assert (faults.slow_factor(109.9), faults.slow_factor(110.0)) == (4.0, 1.0)


async def test_a_status(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    await inject(http, pair[0], kind="status", status=503, count=1)
    status, answer = await post(http, pair[0], BODY)
    assert status == 503 and answer["error"]["code"] == 503
    assert await right(http, pair[0])


async def test_refusing_closes_idle_connections_so_that_nobody_sends_into_them(pair: list[Worker]) -> None:
    host, _, port = pair[0].url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    async with aiohttp.ClientSession() as http:
        await inject(http, pair[0], kind="refuse", count=1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 2)
    writer.close()


async def test_a_refused_connection(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    assert await right(http, pair[0])
    await inject(http, pair[0], kind="refuse", count=1)
    async with aiohttp.ClientSession() as fresh:
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(fresh, pair[0], BODY)
        assert await right(fresh, pair[0])


async def test_a_hang_ends_when_the_client_leaves(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    await inject(http, pair[0], kind="hang", count=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await post(http, pair[0], BODY)
    await until(lambda: pair[0].serving.in_flight == 0)
    assert await right(http, pair[0])


async def test_a_reset_cuts_a_stream_after_some_chunks(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    await inject(http, pair[0], kind="reset", after_chunks=3, count=1)
    received = b""
    with pytest.raises(aiohttp.ClientError):
        async with http.post(pair[0].url + PATH, json={**BODY, "stream": True}) as response:
            async for data in response.content.iter_any():
                received += data
    assert received.count(b"data: ") == 3
    await until(lambda: pair[0].engine.pool.free_blocks == 599)


async def test_blocks_of_a_prefill_whose_reply_was_cut_are_not_the_routers_leak(http: aiohttp.ClientSession) -> None:
    async with running(replace(OPTIONS, kv_lease_duration_s=0.2)) as (worker, _):
        await inject(http, worker, kind="reset", phase="prefill", count=1)
        with pytest.raises(aiohttp.ClientError):
            await post(http, worker, PREFILL)
        await until(lambda: worker.engine.core.counters.expired == 1)
        assert worker.violations.report()["count"] == 0 and dict(worker.violations.counts) == {"reply_lost": 1}


async def test_eos_first_and_null_params(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    await inject(http, pair[0], kind="eos_first", phase="prefill", count=1)
    _, answer = await post(http, pair[0], {**PREFILL, "ignore_eos": False})
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["text"] == ""
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    await inject(http, pair[0], kind="null_params", count=1)
    _, answer = await post(http, pair[0], PREFILL)
    assert answer["kv_transfer_params"] is None and len(pair[0].engine.handoffs.pinned) == 1


async def test_slow_steps_take_longer(http: aiohttp.ClientSession) -> None:
    async with running(replace(OPTIONS, workers=1, speed=20.0)) as (worker,):
        loop = asyncio.get_running_loop()
        assert await right(http, worker)
        await inject(http, worker, kind="slow", factor=20.0)
        began_s = loop.time()
        assert await right(http, worker)
        # Twelve steps of 14 ms, 20 times faster and 20 times slower.
        assert loop.time() - began_s > 12 * 0.014


async def test_a_crash_loses_the_blocks_and_comes_back_as_another_engine(
    http: aiohttp.ClientSession, pair: list[Worker]
) -> None:
    _, answer = await post(http, pair[0], PREFILL)
    old = pair[0].engine.engine_id
    await inject(http, pair[0], kind="crash", duration_s=0.3)
    await until(lambda: not pair[0].up)
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(http, pair[0], BODY)
    await until(lambda: pair[0].up)
    assert pair[0].engine.engine_id != old and pair[0].engine.pool.free_blocks == 599
    assert (await post(http, pair[1], {**BODY, "kv_transfer_params": answer["kv_transfer_params"]}))[0] == 500
    assert await right(http, pair[0])


async def test_a_crash_cuts_what_is_under_way(http: aiohttp.ClientSession) -> None:
    async with running(replace(OPTIONS, workers=1, speed=0.05)) as (worker,):
        call = asyncio.create_task(post(http, worker, BODY))
        await until(lambda: len(worker.engine.core.running) == 1)
        await worker.crash(None)
        with pytest.raises(aiohttp.ClientConnectionError):
            await call
        await until(lambda: worker.serving.in_flight == 0)
        await worker.clear_faults()
        assert worker.up and worker.engine.pool.free_blocks == 599


async def test_the_control_port_reaches_a_worker_that_is_down(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    runner = aiohttp.web.AppRunner(control_app(pair))
    await runner.setup()
    (port,) = free_ports(1)
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    control = f"http://127.0.0.1:{port}"
    async with http.post(f"{control}/workers/1/sim/faults", json={"kind": "crash"}) as response:
        assert response.status == 200
    await until(lambda: not pair[1].up)
    async with http.get(f"{control}/sim/state") as response:
        assert [state["up"] for state in await response.json()] == [True, False]
    async with http.delete(f"{control}/sim/faults") as response:
        assert response.status == 200
    assert await right(http, pair[1])
    async with http.get(f"{control}/sim/violations") as response:
        assert set(await response.json()) == {"sim-0", "sim-1"}
    await runner.cleanup()


async def test_nothing_is_wrong_or_left_after_restarts_under_load(http: aiohttp.ClientSession) -> None:
    options = replace(OPTIONS, workers=4, kv_lease_duration_s=0.5, side_channel_timeout_s=0.3, handshake_s=0.0)
    outcomes: set[object] = set()
    async with running(options) as workers:

        async def handoffs(number: int) -> None:
            for index in range(25):
                prompt = {**BODY, "prompt": BODY["prompt"] + f"{number} {index % 5}"}
                try:
                    _, answer = await post(http, workers[index % 2], {**prompt, **PREFILL, "prompt": prompt["prompt"]})
                    full = {**prompt, "kv_transfer_params": answer["kv_transfer_params"]}
                    status, answer = await post(http, workers[2 + index % 2], full)
                except aiohttp.ClientError:
                    outcomes.add("cut")
                    continue
                if status == 200:
                    outcomes.add(answer["choices"][0]["text"] == expected_answer(PATH, prompt, MODEL))
                else:
                    outcomes.add(status)

        async def restarts() -> None:
            for index in range(12):
                await asyncio.sleep(0.03)
                workers[index % 4].inject(Fault(kind="restart" if index % 3 else "crash", duration_s=0.05))

        async with asyncio.timeout(60):
            await asyncio.gather(restarts(), *(handoffs(number) for number in range(8)))
        assert True in outcomes and outcomes <= {True, "cut", 500}
        for worker in workers:
            await until(lambda each=worker: each.up and each.engine.pool.free_blocks == 599)  # type: ignore[misc]
            assert await right(http, worker) and worker.serving.in_flight == 0
            assert set(worker.violations.counts) <= {"engine_gone", "leaked_blocks", "reply_lost", "peer_lost"}


async def test_an_unknown_fault_is_refused(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    for wrong in ({"kind": "earthquake"}, {"kind": "hang", "probabilty": 0.1}, []):
        assert (await post(http, pair[0], wrong, "/sim/faults"))[0] == 400


def test_a_violation_that_a_fault_explains_is_not_counted_as_the_routers() -> None:
    violations = Violations()
    violations.add("second_use", "a", "x", 1.0)
    violations.add("engine_gone", "b", "y", 2.0)
    report = violations.report()
    assert report["count"] == 1 and [v["request_id"] for v in report["violations"]] == ["a"]
    assert report["environment"]["counts"] == {"engine_gone": 1}


# -- metrics ---------------------------------------------------------------------------------------------------------------


async def samples(http: aiohttp.ClientSession, worker: Worker) -> dict[str, float]:
    """Name and its own labels (not engine and model) -> value."""
    async with http.get(worker.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        for label in ('engine="0"', f'model_name="{MODEL.names[0]}"'):
            name = name.replace(label + ",", "").replace("," + label, "").replace(label, "")
        found[name.replace("{}", "")] = float(value)
    return found


async def test_the_metrics_of_a_handoff(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    _, answer = await post(http, pair[0], PREFILL)
    tokens = answer["usage"]["prompt_tokens"]
    pinned = await samples(http, pair[0])
    blocks = len(answer["kv_transfer_params"]["remote_block_ids"][0])
    assert pinned["vllm:kv_cache_usage_perc"] == pytest.approx(blocks / 599)
    await post(http, pair[1], {**BODY, "kv_transfer_params": answer["kv_transfer_params"]})
    first, second = await samples(http, pair[0]), await samples(http, pair[1])
    assert first["vllm:kv_cache_usage_perc"] == second["vllm:kv_cache_usage_perc"] == 0
    source = "vllm:prompt_tokens_by_source_total{source="
    assert first[source + '"local_compute"}'] == tokens and first[source + '"external_kv_transfer"}'] == 0
    assert second[source + '"local_compute"}'] == 0 and second[source + '"external_kv_transfer"}'] == tokens
    assert second["vllm:external_prefix_cache_hits_total"] == tokens
    assert second["vllm:nixl_bytes_transferred_count"] == 1
    assert second["vllm:nixl_bytes_transferred_sum"] == tokens * 80 * 8 * 128 * 2 * 2
    assert second["vllm:generation_tokens_total"] == 12 and first["vllm:generation_tokens_total"] == 1
    assert second['vllm:request_success_total{finished_reason="length"}'] == 1
    assert second["vllm:time_to_first_token_seconds_count"] == 1
    assert second["vllm:nixl_num_kv_expired_reqs_total"] == 0
    assert first["vllm:num_requests_running"] == first["vllm:num_requests_waiting"] == 0
    await post(http, pair[1], BODY)
    again = await samples(http, pair[1])
    full = tokens // 16 * 16
    assert again["vllm:prefix_cache_hits_total"] == full and again["vllm:prefix_cache_queries_total"] == 2 * tokens
    assert again[source + '"local_cache_hit"}'] == full


async def test_the_metrics_of_a_queue(http: aiohttp.ClientSession) -> None:
    async with running(replace(OPTIONS, workers=1, max_num_seqs=1, speed=0.05)) as (worker,):
        calls = [asyncio.create_task(post(http, worker, BODY)) for _ in range(3)]
        await until(lambda: len(worker.engine.core.waiting) == 2 and len(worker.engine.core.running) == 1)
        found = await samples(http, worker)
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (1, 2)
        assert found['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == 2
        for call in calls:
            call.cancel()
        await until(lambda: worker.engine.pool.free_blocks == 599)
    async with running(replace(OPTIONS, workers=1, max_num_seqs=1, speed=0.05, max_num_queued_reqs=1)) as (worker,):
        calls = [asyncio.create_task(post(http, worker, BODY)) for _ in range(3)]
        await until(lambda: worker.metrics.rejected["queued_reqs"] > 0)
        await until(lambda: any(call.done() for call in calls))
        assert {call.result()[0] for call in calls if call.done()} == {503}
        for call in calls:
            call.cancel()


async def test_the_cache_configuration_tells_block_size_and_count(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    async with http.get(pair[0].url + "/metrics") as response:
        text = await response.text()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in line and 'num_gpu_blocks="600"' in line and line.endswith(" 1.0")


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram([1, 2])
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        histogram.observe(value, count)
    assert histogram.cumulated() == ([("1.0", 3.0), ("2.0", 4.0), ("+Inf", 5.0)], 13.0)


# -- KV events -------------------------------------------------------------------------------------------------------------


async def test_kv_events_and_their_replay(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    port, replay_port = free_ports(2)
    options = replace(
        OPTIONS,
        workers=1,
        kv_events_port=port,
        kv_events_replay_port=replay_port,
        kv_events_topic="kv@here",
        num_blocks=400,
        max_model_len=4096,
    )
    prompt = list(range(1000, 1040))
    context = zmq.asyncio.Context()
    async with running(options) as (worker,):
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@here")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        await asyncio.sleep(0.2)  # a subscription takes its time
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "pepper"}
        await post(http, worker, body)
        async with asyncio.timeout(5):
            topic, number, payload = await subscriber.recv_multipart()
        assert (topic, number) == (b"kv@here", (0).to_bytes(8, "big"))
        _, events, rank = msgspec.msgpack.decode(payload)
        first = hashing.block_hash(hashing.root_hash(), prompt[:16], (("cache_salt", "pepper"),))
        second = hashing.block_hash(first, prompt[16:32])
        assert rank == 0 and events == [
            {
                "type": "BlockStored",
                "block_hashes": [hashing.wire_hash(first), hashing.wire_hash(second)],
                "parent_block_hash": None,
                "token_ids": prompt[:32],
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["pepper"], None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ]
        for start in range(3):  # fills the pool: the first blocks are evicted
            await post(http, worker, {"prompt": [start] * 4000, "max_tokens": 1})
        removed: list[int] = []
        async with asyncio.timeout(5):
            while hashing.wire_hash(first) not in removed:
                _, _, payload = await subscriber.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event["type"] == "BlockRemoved":
                        assert set(event) == {"type", "block_hashes", "medium", "group_idx"}
                        removed += event["block_hashes"]
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://127.0.0.1:{replay_port}")
        await asker.send_multipart((b"", (1).to_bytes(8, "big")))
        numbers = []
        async with asyncio.timeout(5):
            while not numbers or numbers[-1] != -1:
                _, topic, number, payload = await asker.recv_multipart()
                numbers.append(int.from_bytes(number, "big", signed=True))
        assert numbers[:3] == [1, 2, 3] and (topic, payload) == (b"", b"")
        async with http.get(worker.url + "/kv_event_sources") as response:
            assert (await response.json())["0"]["topic"] == "kv@here"
        subscriber.close(0)
        asker.close(0)
    context.term()


async def test_a_decode_worker_publishes_the_blocks_it_pulled(http: aiohttp.ClientSession) -> None:
    (port,) = free_ports(1)
    async with running(OPTIONS) as (first, _), running(replace(OPTIONS, workers=1, kv_events_port=port)) as (second,):
        _, answer = await post(http, first, PREFILL)
        await post(http, second, {**BODY, "kv_transfer_params": answer["kv_transfer_params"]})
        assert second.publisher is not None
        batch = msgspec.msgpack.decode(second.publisher.batches()[0][1])
        assert len(batch[1][0]["block_hashes"]) == answer["usage"]["prompt_tokens"] // 16


# -- the command -----------------------------------------------------------------------------------------------------------


async def test_a_port_in_use_leaves_nothing_behind() -> None:
    async with running(OPTIONS) as (worker, _):
        taken = worker_options(replace(OPTIONS, workers=1, port=worker.port))[0]
        second = Worker(taken)
        with pytest.raises(OSError, match="in use"):
            await second.__aenter__()
        assert second.engine.stopped and not second.up


def test_every_option_is_a_flag() -> None:
    options = parse(
        [
            *("--port", "9000", "--workers", "2", "--speed", "0", "--served-model-name", "a", "b", "--strict-crash"),
            *("--side-channel-port", "5600", "--kv-events-port", "5557", "--no-enable-prefix-caching"),
            *("--lora-modules", "ada=/x"),
        ]
    )
    first, second = worker_options(options)
    assert (first.port, second.port) == (9000, 9001)
    assert (first.engine.side_channel_port, second.engine.side_channel_port) == (5600, 5601)
    assert (first.events_endpoint, second.events_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert first.model.names == ("a", "b") and first.model.adapters == {"ada": "/x"}
    assert first.engine.strict_crash and not first.engine.core.prefix_caching
    assert first.events_replay_endpoint is None


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"num_blocks": 10}, {"kv_load_failure_policy": "hope"}])
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"workers|blocks|policy"):
        worker_options(replace(SimOptions(), **wrong))
