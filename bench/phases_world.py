"""The filter's parts without network, and one request that goes through them: what :mod:`bench.phases` measures."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import msgspec
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc import wire
from extproc.attempts import leg_id
from extproc.chains import KnownChains
from extproc.config import Config, Workers
from extproc.dispatcher import Dispatcher
from extproc.filter import Filter
from extproc.handoff import Pair
from extproc.handoff.choose import connector
from extproc.headers import (
    DESTINATION_HEADER,
    KV_TRANSFER_HEADER,
    LB_NAMESPACE,
    ROUTING_HEADERS,
    SERVED_KEY,
    TAGS_NAMESPACE,
    USAGE_NAMESPACE,
)
from extproc.inference import parse
from extproc.intake import Intake
from extproc.journey import Journey, Parts
from extproc.kv import routing_of
from extproc.observe.engines import Engines
from extproc.observe.log_lines import GENERATION_TAG, TTFT_TAG
from extproc.observe.logs import make_logger, make_writer
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.own_time import ANSWER, PARSE, PREFILL_CALL, REPLY, OwnTime
from extproc.observe.request_log import RequestLog
from extproc.paths import Treatment, treatment
from extproc.policy import override_headers
from extproc.policy_config import HeaderMatch, Match, PathMatch, PolicyRule
from extproc.prompt import DEFAULT_BYTES_PER_TOKEN, BytesPerToken, PromptSettings, read_prompt
from extproc.recent import Recent
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Mode
from extproc.routing.pool import Pool
from extproc.routing.router import Router

_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_CONVERSATIONS = 12
"""Prompts go on with one of them: two thirds of each was sent before, the rest is new."""
_KNOWN_SHARE = 2 / 3
_STREAMS = 4
"""Requests that decode at any time."""
_DEADLINE_S = 300.0
_BLOCK_IDS = 100
"""Of a prefill's reply."""

Measure = Callable[[str, Callable[[], Any]], Any]
"""(phase, work) -> what the work returns."""


class Sent(NamedTuple):
    """One request of a client."""

    number: int
    body: bytes


def prompts(size_bytes: int, chance: random.Random) -> Iterator[bytes]:
    """Chat bodies of about ``size_bytes``, as the usual clients spell them, each the next turn of a conversation."""
    words = [
        "".join(chance.choices("etaoinshrdlucmfwypvbgkjqxz", weights=range(26, 0, -1), k=chance.randint(2, 9)))
        for _ in range(5_000)
    ]
    text = " ".join(chance.choices(words, k=max(size_bytes // 3, 1_000)))
    known = [_turns(text, chance, int(size_bytes * _KNOWN_SHARE)) for _ in range(_CONVERSATIONS)]
    known_bytes = len(json.dumps(known[0]))
    for number in itertools.count():
        turns = [*known[number % len(known)], *_turns(text, chance, max(size_bytes - known_bytes - 250, 64))]
        body = {
            "model": _MODEL,
            "messages": [{"role": "system", "content": "You are a helpful assistant."}, *turns],
            "temperature": 0.7,
            "max_tokens": 400,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _turns(text: str, chance: random.Random, size_bytes: int) -> list[dict[str, str]]:
    """Messages of 200 bytes to 8 KB, with line ends and quotes in them."""
    turns: list[dict[str, str]] = []
    left = size_bytes
    while left > 60:
        size = min(left, chance.randint(200, 8_192))
        start = chance.randrange(max(len(text) - size, 1))
        lines = text[start : start + max(size - 60, 1)]
        content = "\n".join(lines[at : at + 90] for at in range(0, len(lines), 90)).replace(" tho ", ' "tho" ')
        turns.append({"role": ("user", "assistant")[len(turns) % 2], "content": content})
        left -= size
    return turns


class _WarmUp:
    def admit(self, _job: object) -> None:
        """Nothing to wait for."""


class World:
    """Two prefill and two decode workers; and the dispatchers of two other pools, for other ways to decide."""

    def __init__(self) -> None:
        rules = [
            PolicyRule(name="batch", match=Match(headers={"x-batch": HeaderMatch(present=True)}), priority=5),
            PolicyRule(name="completions", match=Match(path=PathMatch(prefix="/v1/completions"))),
            # All of it is weighed, and handed over whatever it weighs.
            PolicyRule(name="chat", tenant_header="x-tenant", session_header="x-session-id", threshold_uncached_tokens=1),
        ]
        config = Config(workers=Workers(prefill=["10.0.0.1:8000"], decode=["10.0.1.1:8000"]), policies=rules)
        self._metrics = Metrics()
        self._pool = _pool(2, 2)
        self._log_writer = make_writer(os.open(os.devnull, os.O_WRONLY))
        self._log = make_logger("info", sink=self._log_writer)
        self._sizes = BytesPerToken()
        self._intake = Intake(config, self._sizes)
        self._connector = connector(config.handoff)
        self._observer = Observer(config, self._metrics, self._log)
        self._recent = Recent()
        self._chains = KnownChains()
        self._engines = Engines(self._metrics)

        def dispatcher(pool: Pool) -> Dispatcher:
            router = Router(pool, routing_of(config))
            return Dispatcher(
                router, names=self._intake.names, metrics=self._metrics, log=self._log, longest_request_s=86_400.0
            )

        self._dispatcher = dispatcher(self._pool)
        self._large = dispatcher(_pool(32, 32))
        self._at_once = dispatcher(_pool(2, 2))
        self._open: deque[Callable[[], None]] = deque()

        def parts(log_sample: float) -> Parts:
            return Parts(
                config=Config(workers=config.workers, policies=rules, log_sample=log_sample),
                pool=self._pool,
                dispatcher=self._dispatcher,
                intake=self._intake,
                bytes_per_token=self._sizes,
                connector=self._connector,
                prefiller=None,  # type: ignore[arg-type]  # nothing is called over the network here
                releaser=None,  # type: ignore[arg-type]
                warm_up=_WarmUp(),  # type: ignore[arg-type]
                engines=self._engines,
                metrics=self._metrics,
                observer=self._observer,
                log=self._log,
                recent=self._recent,
                request_log=RequestLog(self._log, self._log_writer),
            )

        self._parts = parts(1.0)
        self._silent, self._logging = Filter(parts(0.0)), Filter(self._parts)

    def serve(self, sent: Sent, measure: Measure) -> None:
        """One request, from Envoy's first message to the line in Envoy's log."""
        parts = self._parts
        head_bytes, body_bytes = _head_message(sent), _body_message(sent.body)

        head = measure("headers: message -> event", lambda: wire.read_event(pb.ProcessingRequest.FromString(head_bytes)))
        headers = head.headers
        journey: Journey = measure(
            "headers: note, observer",
            lambda: Journey(parts, None),  # type: ignore[arg-type]
        )
        record = journey.record

        def treat() -> bytes:
            record.request_id = headers["x-request-id"]
            record.method = headers[":method"]
            record.path = headers[":path"].partition("?")[0]
            record.treatment = treatment(record.method, headers[":path"])
            forbidden = tuple(name for name in ROUTING_HEADERS if name in headers) + tuple(override_headers(headers))
            change = wire.Mutation(remove_headers=forbidden, watch_answer=True, tags=journey.marks("none"))
            reply: bytes = wire.headers_reply(change)
            return reply

        measure("headers: treatment, reply", treat)
        event = measure("body: message -> event", lambda: wire.read_event(pb.ProcessingRequest.FromString(body_bytes)))
        body: bytes = event.body
        record.body_bytes = len(body)
        request = measure("body: JSON", lambda: parse(body, Treatment.CHAT))
        prompt = measure(
            "body: prompt, block hashes",
            lambda: read_prompt(
                request, PromptSettings(), model=_MODEL, bytes_per_token=DEFAULT_BYTES_PER_TOKEN, known=self._chains
            ),
        )
        # The chain is made once in a request: what it takes here is in the line above.
        self._intake._prompt = lambda _request, _model: prompt  # type: ignore[method-assign]
        arrived_s = parts.clock()
        asked = measure(
            "body: policy, model, job",
            lambda: self._intake.read(
                request,
                headers=headers,
                path=record.path,
                size_bytes=len(body),
                request_id=record.request_id,
                arrived_s=arrived_s,
                deadline_s=arrived_s + _DEADLINE_S,
            ),
        )
        job = asked.job
        journey.job = job
        self._decide_elsewhere(job, measure)

        def stream_options() -> None:
            if request.streamed():
                journey.observed.states_usage = request.states_usage()
                parts.observer.draw(journey.observed, 0.01, record.request_id)
            journey.tenant = parts.metrics.accounts.tenant(job.tenant, "x-tenant")

        measure("body: stream, tenant", stream_options)
        ticket = measure("decide: submit, note", lambda: _result(journey.place(job)))
        assert ticket.prefill is not None and ticket.decode is not None
        pair = Pair(ticket.prefill.address, ticket.decode.address, measure("prefill: request id", lambda: leg_id("r-1")))
        measure("prefill: body", lambda: request.prefill_body(self._connector.prefill_params(pair)))
        reply = _prefill_reply(job.tokens, int(job.tokens * _KNOWN_SHARE))
        handoff = measure("prefill: reply -> handoff", lambda: self._connector.accept(reply, pair))
        measure(
            "prefill: done, index",
            lambda: self._dispatcher.prefilled(
                ticket, tokens=handoff.tokens, cached_tokens=handoff.cached_tokens, engine_id=handoff.engine_id
            ),
        )
        changed = measure("decode: body", lambda: request.decode_body(handoff.params))

        def body_reply() -> bytes:
            mutation = wire.Mutation(
                set_headers={**handoff.headers, **journey.onward, KV_TRANSFER_HEADER: handoff.header()},
                body=changed,
                destination=pair.decode,
                tags=journey.marks("disaggregate"),
            )
            reply: bytes = wire.body_reply(mutation)
            return reply

        measure("decode: reply", body_reply)

        def dispatched() -> None:
            record.outcome = "handoff"
            record.blocks, record.tokens = handoff.blocks, handoff.tokens
            record.reported_cached_tokens = handoff.cached_tokens
            parts.bytes_per_token.note(_MODEL, asked.prompt.text_bytes, handoff.tokens)
            parts.metrics.prefill_seconds.observe(0.2, "ok")
            parts.metrics.handoff_age_seconds.observe(0.002)
            journey.sent_to(pair.decode, handoff.tokens, handoff=True)
            parts.metrics.handoffs.inc(handoff.connector, handoff.prefill, pair.decode)
            parts.recent.came()
            parts.recent.handed_over(handoff.prefill, pair.decode)
            parts.metrics.handoff_blocks.observe(handoff.blocks)

        measure("decode: metrics, recent", dispatched)
        measure("own time by phase", _own_time)
        answer_bytes = _answer_message(pair.decode)

        def answered() -> bytes:
            event = wire.read_event(pb.ProcessingRequest.FromString(answer_bytes))
            journey.answered(event)
            reply: bytes = wire.go_on(event)
            return reply

        measure("answer: message, health, reply", answered)
        lines = als_pb2.StreamAccessLogsMessage()
        lines.http_logs.log_entry.append(_log_entry(journey.observed.note.key, pair.decode))
        line_bytes = lines.SerializeToString()

        def over() -> None:
            measure("end: give back", journey.held.release)
            journey.on_answer = None  # as the filter does
            measure("end: metrics, accounts", lambda: self._silent._note(journey, 1.25))
            measure("end: log line", lambda: self._logging._log_line(journey, "chat", 1.25))
            measure(
                "end: Envoy's log line",
                lambda: self._observer.access_log.take(als_pb2.StreamAccessLogsMessage.FromString(line_bytes)),
            )

        self._open.append(over)
        if len(self._open) > _STREAMS:
            self._open.popleft()()

    def _decide_elsewhere(self, job: Any, measure: Measure) -> None:
        """The same prompt in other pools."""
        forced = _changed(job, mode=Mode.DISAGGREGATE, held=False, threshold_uncached_tokens=None)
        for phase, dispatcher, each in (
            ("decide: the same with 64 workers", self._large, job),
            ("decide: sent at once, mode disaggregate", self._at_once, forced),
        ):

            def decide(dispatcher: Dispatcher = dispatcher, each: Any = each) -> Any:
                ticket = dispatcher.submit(each)
                dispatcher.settled(ticket)
                dispatcher.note(ticket, "r-1")
                return ticket

            ticket = measure(phase, decide)
            dispatcher.prefilled(ticket, tokens=job.tokens, cached_tokens=job.tokens // 2, engine_id=None)
            dispatcher.finish(ticket)


def _changed(job: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(job, aims=msgspec.structs.replace(job.aims, **changes))


def _pool(prefill: int, decode: int) -> Pool:
    def specs(network: int, count: int) -> tuple[EndpointSpec, ...]:
        return tuple(EndpointSpec(address=f"10.{network}.0.{number + 1}:8000") for number in range(count))

    pool = Pool(EndpointSet(prefill=specs(0, prefill), decode=specs(1, decode)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
        pool.set_models(endpoint, {_MODEL: b'{"id":"m"}'})
    return pool


def _result(work: Coroutine[Any, Any, Any]) -> Any:
    """Of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the prompt had to wait: the pool is too small for this benchmark")


# -- what Envoy and the workers send ---------------------------------------------------------------------------------------


def _head_message(sent: Sent) -> bytes:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = 2
    for name, value in (
        (":authority", "llm.example.com"),
        (":path", "/v1/chat/completions"),
        (":method", "POST"),
        (":scheme", "http"),
        ("host", "llm.example.com"),
        ("accept", "application/json"),
        ("accept-encoding", "gzip, deflate"),
        ("user-agent", "OpenAI/Python 1.99.0"),
        ("content-type", "application/json"),
        ("content-length", str(len(sent.body))),
        ("authorization", "Bearer sk-0123456789abcdef0123456789abcdef"),
        ("x-tenant", f"team-{sent.number % 20}"),
        ("x-session-id", f"conversation-{sent.number % _CONVERSATIONS}"),
        ("x-forwarded-for", "10.9.8.7"),
        ("x-forwarded-proto", "http"),
        ("x-request-id", f"6f1c8a2e-6e0a-4b0e-9d8e-{sent.number:012x}"),
    ):
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    return message.SerializeToString()


def _body_message(body: bytes) -> bytes:
    message = pb.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = True
    return message.SerializeToString()


def _answer_message(served: str) -> bytes:
    message = pb.ProcessingRequest()
    for name, value in ((":status", "200"), ("content-type", "text/event-stream"), ("date", "x"), ("server", "uvicorn")):
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    fields = message.metadata_context.filter_metadata[LB_NAMESPACE].fields
    fields[DESTINATION_HEADER].string_value = served
    fields[SERVED_KEY].string_value = served
    return message.SerializeToString()


def _log_entry(key: str, served: str) -> accesslog_pb2.HTTPAccessLogEntry:
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common, host = entry.common_properties, served.rpartition(":")
    common.upstream_remote_address.socket_address.address = host[0]
    common.upstream_remote_address.socket_address.port_value = int(host[2])
    common.duration.seconds = 7
    common.response_flags.SetInParent()  # Envoy always does, though mostly none is set
    tags = common.metadata.filter_metadata[TAGS_NAMESPACE].fields
    for name, value in (("model", _MODEL), ("policy", "chat"), ("mode", "disaggregate"), ("tenant", "team-1"), ("id", key)):
        tags[name].string_value = value
    usage = common.metadata.filter_metadata[USAGE_NAMESPACE].fields
    usage["prompt_tokens"].number_value, usage["completion_tokens"].number_value = 1_000, 300
    common.custom_tags[TTFT_TAG], common.custom_tags[GENERATION_TAG] = "250000", "6750000"
    entry.request.request_id = "6f1c8a2e-6e0a-4b0e-9d8e-000000000000"
    entry.response.response_code.value, entry.response.response_code_details = 200, "via_upstream"
    entry.response.response_headers["content-type"] = "text/event-stream"
    return entry


def _prefill_reply(tokens: int, cached_tokens: int) -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": _MODEL,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "The"}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens + 1, "completion_tokens": 1},
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(range(_BLOCK_IDS))],
                "remote_engine_id": "engine-0123456789abcdef",
                "remote_request_id": "chatcmpl-r-1",
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": tokens,
                "remote_prefill_cached_tokens": cached_tokens,
            },
        }
    ).encode()


class _Wait:
    def __await__(self):  # type: ignore[no-untyped-def]
        yield


async def _steps(own: OwnTime) -> None:
    for phase in (PARSE, PREFILL_CALL, REPLY, ANSWER):
        own.enter(phase)
        await _Wait()


def _own_time() -> None:
    """The request's task, and that of its prefill."""
    own = OwnTime()
    for _ in range(2):
        task = own.of(_steps(own))
        for _ in range(4):
            task.send(None)
        task.close()
