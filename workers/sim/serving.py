"""One generation request on its way through a worker: checks, faults, the engine, and the answer, whole or streamed.

What may live here: what all generating endpoints share. How an answer looks is an endpoint's :class:`Shape`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from workers.sim import fields as checks
from workers.sim import tokens
from workers.sim.engine import Generation
from workers.sim.errors import ENGINE_DEAD, ApiError, PlainError, internal
from workers.sim.faults import REQUEST_KINDS, Fault, Phase
from workers.sim.prompts import Prepared
from workers.sim.request import Sequence
from workers.sim.text import Step

if TYPE_CHECKING:
    from workers.sim.worker import Worker

encode = msgspec.json.Encoder().encode


@dataclass
class Result:
    """One answer as far as it is."""

    index: int
    sequence: Sequence
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, steps: list[Step]) -> None:
        """Take new tokens."""
        for step in steps:
            self.parts.append(step.text)
            self.token_ids.append(step.token_id)
        self.finish_reason, self.stop_reason = steps[-1].finish_reason, steps[-1].stop_reason

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    @property
    def prompt(self) -> list[int]:
        """The prompt it answers."""
        return self.sequence.prompt


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self) -> bytes:
        """What a stream starts with, before the engine has done anything."""
        ...

    def begin(self, results: list[Result], /) -> bytes:
        """Before the first token of a stream."""
        ...

    def delta(self, result: Result, steps: list[Step]) -> bytes:
        """New tokens of one answer, one event a token."""
        ...

    def end(self, results: list[Result]) -> bytes:
        """After the last token of a stream."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        ...

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream."""
        ...


def event(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(payload) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(worker: Worker, results: list[Result], *, streamed: bool = False) -> dict[str, Any]:
    """Token counts in OpenAI's form."""
    prompts = {id(r.prompt): len(r.prompt) for r in results}
    prompt = sum(prompts.values())
    completion = sum(len(r.token_ids) for r in results)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    details = cached_tokens(worker, results)
    if not streamed or details is not None:
        counts["prompt_tokens_details"] = None if details is None else {"cached_tokens": details}
    if not streamed:
        counts["completion_tokens_details"] = None
    return counts


def cached_tokens(worker: Worker, results: list[Result], *, always: bool = False) -> int | None:
    """Prompt tokens that were not computed anew; None unless the server was told to say, or it is said ``always``. A decode
    leg says what its prefill worker found in its cache."""
    if not (always or worker.options.enable_prompt_tokens_details):
        return None
    sequence = results[-1].sequence
    params = sequence.kv_params or {}
    remote = params.get("remote_prefill_cached_tokens")
    if params.get("do_remote_prefill") and isinstance(remote, int):
        return remote
    return (sequence.cached_tokens or 0) + sequence.host_tokens


def prompt_logprobs(result: Result) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` of a model that is certain: none for the first token, log probability 0 for the others."""
    wanted = result.sequence.prompt_logprobs
    if wanted is None:
        return None
    strings = tokens.token_strings(result.prompt)
    entries: list[dict[str, Any] | None] = [
        {str(token_id): {"logprob": 0.0, "rank": 1, "decoded_token": string}}
        for token_id, string in zip(result.prompt, strings, strict=True)
    ]
    return [None, *entries[1:]]


def phase_of(body: Any) -> Phase:
    """Which leg of a handoff a body is."""
    params = body.get("kv_transfer_params") if isinstance(body, dict) else None
    if isinstance(params, dict) and params.get("do_remote_decode"):
        return "prefill"
    if isinstance(params, dict) and params.get("do_remote_prefill"):
        return "decode"
    return "any"


def audit(body: Any, count: Callable[[str, str], None]) -> None:
    """Count what a router does wrong and can be seen in the body."""
    if not isinstance(body, dict):
        return
    params = body.get("kv_transfer_params")
    sampling = body.get("sampling_params")
    for name, extra in (
        ("vllm_xargs", body.get("vllm_xargs")),
        ("sampling_params.extra_args", sampling.get("extra_args") if isinstance(sampling, dict) else None),
    ):
        if isinstance(extra, dict) and ("kv_transfer_params" in extra or "ec_transfer_params" in extra):
            count("smuggled_params", name)
    if not isinstance(params, dict) or not params:
        return
    leg = phase_of(body)
    if leg == "prefill" and body.get("stream"):
        count("streamed_prefill", "stream is true")
    if leg != "any":
        prompt = body.get("prompt")
        if isinstance(body.get("n"), int) and body["n"] > 1:
            count("several_sequences", f"n is {body['n']}, a {leg} leg")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            count("several_sequences", f"{len(prompt)} prompts, a {leg} leg")
    if leg == "prefill" and isinstance(low := body.get("min_tokens"), int):
        caps = [body[key] for key in ("max_completion_tokens", "max_tokens") if isinstance(body.get(key), int)]
        if caps and low > caps[0]:
            count("min_tokens_above_cap", f"min_tokens {low}, cap {caps[0]}")


class Serving:
    """Runs generation requests on one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.in_flight = 0

    async def handle(
        self,
        request: web.Request,
        check: Callable[[Any], dict[str, Any]],
        prepare: Callable[[dict[str, Any]], Prepared],
        shape: Callable[[Prepared, str], Shape],
        *,
        prefix: str,
        use_header: bool = True,
        releases: bool = True,
        error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body,
    ) -> web.StreamResponse:
        """One request from its bytes to its last chunk.

        ``prefix`` and the X-Request-Id header make its id; without ``use_header`` the body's id is taken as it is.
        ``releases``: a refused request gives its handoff back.
        """
        worker = self._worker
        raw = await request.read()
        self.in_flight += 1
        value: Any = None
        try:
            try:
                value = checks.decode_body(raw, request.headers.get("content-type", ""))
                fault = worker.faults.take(REQUEST_KINDS, phase_of(value), time.monotonic())
                if fault is not None:
                    await self._before(request, fault)
                body = check(value)
            except PlainError as error:
                return web.json_response({"detail": error.detail}, status=error.status)
            except ApiError as error:
                self._audit(value, "", prefix)
                return _json(error.body(), error.status)
            own = body.get("request_id")
            given = request.headers.get("x-request-id") if use_header else None
            base = given if given is not None else str(own or uuid.uuid4().hex)
            request_id = base if own and not use_header else prefix + base
            self._audit(body, request_id, prefix)
            params = body.get("kv_transfer_params") or {}
            try:
                if fault is not None and fault.kind == "status":
                    raise _injected(fault)
                if worker.engine.dead:
                    raise internal(ENGINE_DEAD)
                worker.check_admission()
                prepared = prepare(body)
                if use_header:
                    _check_rank(request)
            except ApiError as error:
                if releases and params.get("do_remote_prefill"):
                    worker.engine.reject(request_id, params)
                return _json(error_body(error), error.status)
            answer = shape(prepared, request_id)
            headers = {"x-request-id": base} if worker.options.enable_request_id_headers else None
            return await self._run(request, prepared, request_id, answer, fault, headers, error_body)
        finally:
            self.in_flight -= 1

    async def refused(self, request: web.Request, body: bytes) -> None:
        """What a fault or a dead engine does to a request that needs no engine. Raises ApiError."""
        fault = self._worker.faults.take(REQUEST_KINDS, "any", time.monotonic()) if body else None
        if fault is not None:
            await self._before(request, fault)
            if fault.kind == "status":
                raise _injected(fault)
        if self._worker.engine.dead:
            raise internal(ENGINE_DEAD)

    async def _before(self, request: web.Request, fault: Fault) -> None:
        """What a fault does before the engine sees anything."""
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "slow" and fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.kind == "reset" and not fault.after_chunks:
            _cut(request)
            await asyncio.Event().wait()

    def _audit(self, body: Any, request_id: str, prefix: str) -> None:
        audit(body, lambda kind, detail: self._worker.engine.violate(kind, request_id or prefix, detail))

    def _sequences(self, prepared: Prepared, request_id: str, fault: Fault | None) -> list[Sequence]:
        worker, body = self._worker, prepared.fields
        kind = fault.kind if fault is not None else None
        several = len(prepared.prompts) > 1
        wanted = body.get("prompt_logprobs")
        if wanted is None and prepared.echo:
            wanted = prepared.logprobs
        made = []
        for number, (ids, rules) in enumerate(zip(prepared.prompts, prepared.rules, strict=True)):
            name = f"{request_id}-{number}" if several or request_id.startswith("cmpl-") else request_id
            suffix = secrets.token_hex(4)
            for child in range(prepared.n):
                full = f"{name}-{suffix}"
                made.append(
                    Sequence(
                        request_id=full if prepared.n == 1 else f"{child}_{full}",
                        prompt=ids,
                        stop=rules,
                        adapter=prepared.adapter,
                        adapter_path=worker.model.adapters.get(prepared.adapter, ""),
                        cache_salt=body.get("cache_salt"),
                        kv_params=dict(prepared.kv_params) if prepared.kv_params else None,
                        prompt_logprobs=wanted,
                        eos_first=kind == "eos_first",
                        null_params=kind == "null_params",
                    )
                )
        return made

    async def _run(
        self,
        request: web.Request,
        prepared: Prepared,
        request_id: str,
        shape: Shape,
        fault: Fault | None,
        headers: dict[str, str] | None,
        error_body: Callable[[ApiError], dict[str, Any]],
    ) -> web.StreamResponse:
        engine = self._worker.engine
        sequences = self._sequences(prepared, request_id, fault)
        generations = [engine.submit(sequence, stream=prepared.stream) for sequence in sequences]
        results = [Result(index, sequence) for index, sequence in enumerate(sequences)]
        delivered = False
        try:
            if prepared.stream:
                response = await self._stream(request, shape, generations, results, fault, headers)
                delivered = True
                return response
            for generation, result in zip(generations, results, strict=True):
                steps = await generation.wait()
                if steps:
                    result.add(steps)
                error = _failure(generation)
                if error is not None:
                    return _json(error_body(error), error.status, headers)
            payload = encode(shape.whole(results))
            if fault is not None and fault.kind == "reset":
                _cut(request)
                await asyncio.Event().wait()
            delivered = request.transport is not None and not request.transport.is_closing()
            headers = {**(headers or {}), **self._worker.load_header(request.headers.get("endpoint-load-metrics-format", ""))}
            return web.Response(body=payload, content_type="application/json", headers=headers)
        finally:
            for generation in generations:
                engine.finish(generation)
                if generation.end is not None:
                    self._worker.metrics.observe(generation.sequence, generation.end)
            if not delivered:
                for sequence in sequences:
                    if pinned := engine.handoffs.pinned.get(sequence.request_id):
                        pinned.reply_lost = True

    async def _stream(
        self,
        request: web.Request,
        shape: Shape,
        generations: list[Generation],
        results: list[Result],
        fault: Fault | None,
        headers: dict[str, str] | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **(headers or {})})
        await response.prepare(request)
        if opening := shape.opening():
            await response.write(opening)
        cut_after = fault.after_chunks if fault is not None and fault.kind == "reset" else None
        chunks = 0
        begun = False
        error: ApiError | None = None
        async for number, steps in _merged(generations):
            if not steps:
                error = error or _failure(generations[number])
                continue
            data = b"" if begun else shape.begin(results)
            begun = True
            if cut_after is not None and chunks + len(steps) >= cut_after:
                steps = steps[: max(0, cut_after - chunks)]
                if steps:
                    results[number].add(steps)
                    await response.write(data + shape.delta(results[number], steps))
                _cut(request)
                await asyncio.Event().wait()
            chunks += len(steps)
            results[number].add(steps)
            data += shape.delta(results[number], steps)
            if data:
                await response.write(data)
        await response.write(shape.failure(error) if error is not None else shape.end(results))
        await response.write_eof()
        return response


async def _merged(generations: list[Generation]) -> Any:
    """(number, steps) of several generations as they come; an empty list is the end of one."""
    if len(generations) == 1:
        while True:
            steps = await generations[0].wait()
            yield 0, steps
            if not steps:
                return
    queue: asyncio.Queue[tuple[int, list[Step]]] = asyncio.Queue()

    async def pump(number: int, generation: Generation) -> None:
        while True:
            steps = await generation.wait()
            queue.put_nowait((number, steps))
            if not steps:
                return

    pumps = [asyncio.create_task(pump(number, generation)) for number, generation in enumerate(generations)]
    open_ones = len(generations)
    try:
        while open_ones:
            number, steps = await queue.get()
            open_ones -= not steps
            yield number, steps
    finally:
        for task in pumps:
            task.cancel()


def _failure(generation: Generation) -> ApiError | None:
    if generation.end == "error":
        return internal()
    if generation.end == "dead":
        return internal(ENGINE_DEAD)
    if generation.end == "abort":
        return internal("Request was aborted")
    return None


def _check_rank(request: web.Request) -> None:
    """One data-parallel rank there is."""
    rank = request.headers.get("x-data-parallel-rank", "0").strip()
    if rank.lstrip("-").isdecimal() and int(rank) != 0:
        raise ApiError(f"data_parallel_rank {int(rank)} is out of range [0, 1).")


def _injected(fault: Fault) -> ApiError:
    return ApiError("Injected fault", status=fault.status, kind="InternalServerError")


def _json(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, content_type="application/json", headers=headers)


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
