"""A worker is asked for the token ids of a prompt: `/tokenize`, or one of its render endpoints. Facts are those of vLLM 0.32.

One that fails, or has no such endpoint, is left alone for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import aiohttp
import msgspec

from extproc import bounded
from extproc.find import holds
from extproc.inference import InferenceRequest
from extproc.paths import Treatment
from extproc.routing.token_chain import Placed
from extproc.tls.workers import WorkerLink
from extproc.tokens.conversation import CannotError
from extproc.tokens.identity import NO_PART

_RENDER: Final = {
    Treatment.CHAT: "/v1/chat/completions/render",
    Treatment.COMPLETIONS: "/v1/completions/render",
    Treatment.MESSAGES: "/v1/messages/render",
    Treatment.RESPONSES: "/v1/responses/render",
}
"""403 unless the worker was started with `--enable-scale-out`."""

_TOKENIZE: Final = "/tokenize"

_CHAT_FIELDS: Final = frozenset(
    (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template_kwargs",),
    )
)
"""That `/tokenize` reads as the chat itself does."""

_CHAT_WITHOUT_PART: Final = frozenset(
    ("cache_salt", "parallel_tool_calls", "response_format", "structured_outputs", "vllm_xargs", "tool_choice")
)
_AS_KWARGS: Final = ("documents", "reasoning_effort")
"""`/tokenize` does not know them; the template gets them all the same."""

_COMPLETION_FIELDS: Final = frozenset(("model", "prompt", "add_special_tokens"))

_NOT_THERE_S: Final = 60.0
_FAILED_S: Final = 5.0
_FAILURES: Final = 3
_MAX_REPLY_BYTES: Final = 64 << 20
_MOST_WORKERS: Final = 4096

_NULL = b"null"
_encode = msgspec.json.Encoder().encode


class Answer(NamedTuple):
    """What a worker said."""

    listed: bytes
    """The token ids, a JSON list."""
    items: Sequence[Placed] = ()


class _Place(msgspec.Struct, frozen=True):
    offset: int
    length: int


class _Features(msgspec.Struct, frozen=True):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct, frozen=True):
    token_ids: msgspec.Raw
    features: _Features | None = None


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: msgspec.Raw


_rendered = msgspec.json.Decoder(_Rendered)
_rendered_list = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)
_kwargs = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Breaker:
    """Which workers are left alone, and how long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def lets(self, worker: str) -> bool:
        """Whether it may be asked."""
        return self._until_s.get(worker, 0.0) <= self._clock()

    def worked(self, worker: str) -> None:
        """It answered."""
        self._failures.pop(worker, None)
        self._until_s.pop(worker, None)

    def failed(self, worker: str, *, not_there: bool = False) -> None:
        """It did not. ``not_there``: it never will, unless it is started in another way."""
        if len(self._failures) >= _MOST_WORKERS:
            self._failures.clear()
            self._until_s.clear()
        count = self._failures[worker] = self._failures.get(worker, 0) + 1
        if not_there or count >= _FAILURES:
            self._until_s[worker] = self._clock() + (_NOT_THERE_S if not_there else _FAILED_S)

    @property
    def open(self) -> int:
        """Workers that are left alone now."""
        now_s = self._clock()
        return sum(until_s > now_s for until_s in self._until_s.values())


class Asker:
    """Asks workers. Use as an async context manager."""

    def __init__(
        self,
        mode: Literal["tokenize", "render"],
        *,
        link: WorkerLink,
        own_headers: Mapping[str, str],
        workers: Callable[[str], Sequence[str]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``workers`` names live ones that serve a model. ``own_headers``: see :mod:`extproc.worker_key`."""
        self._mode = mode
        self._link = link
        self._headers = own_headers
        self._workers = workers
        self._timeout_s = timeout_s
        self.breaker = Breaker(clock)
        self._turn = 0

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ids(self, request: InferenceRequest, model: str, *, media: bool) -> Answer:
        """What a worker makes of the prompt. ``media``: it is not all text. Raises CannotError."""
        path, body = self._call(request, media=media)
        live = self._workers(model)
        worker = next((each for each in self._in_turn(live) if self.breaker.lets(each)), None)
        if worker is None:
            raise CannotError("left_alone" if live else "no_worker")
        headers = {**self._headers, "content-type": "application/json"}
        try:
            async with self._session.post(
                self._link.url(worker, path), data=body, headers=headers, **self._link.how
            ) as response:
                reply = await bounded.read(response, _MAX_REPLY_BYTES)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError, bounded.TooLargeError):
            self.breaker.failed(worker)
            raise CannotError("ask_failed") from None
        except asyncio.CancelledError:
            self.breaker.failed(worker)  # it took longer than a request may wait
            raise
        return self._read(worker, status, reply)

    def _in_turn(self, live: Sequence[str]) -> Sequence[str]:
        self._turn += 1
        at = self._turn % len(live) if live else 0
        return [*live[at:], *live[:at]]

    def _call(self, request: InferenceRequest, *, media: bool) -> tuple[str, bytes]:
        if self._mode == "render":
            fields: dict[str, Any] = {
                name: raw for name, raw in request.fields.items() if name not in NO_PART and name != "vllm_xargs"
            }
            if media:
                fields["mm_payload"] = msgspec.Raw(b'"none"')
            if request.treatment is Treatment.MESSAGES:
                fields["max_tokens"] = 1  # which that API asks for
            return _RENDER[request.treatment], _encode(fields)
        if media:
            raise CannotError("multimodal")
        if request.treatment is Treatment.CHAT:
            return _TOKENIZE, _tokenize_chat(request)
        if request.treatment is Treatment.COMPLETIONS:
            return _TOKENIZE, _encode(_only(request, _COMPLETION_FIELDS, _CHAT_WITHOUT_PART))
        raise CannotError("api")

    def _read(self, worker: str, status: int, reply: bytes) -> Answer:
        if status != 200:
            if status in (400, 413, 422):
                self.breaker.worked(worker)
                raise CannotError("refused")  # it will refuse the request itself as well
            self.breaker.failed(worker, not_there=status in (401, 403, 404, 405, 501))
            raise CannotError("ask_failed")
        try:
            if self._mode == "tokenize":
                answer = Answer(bytes(_tokenized.decode(reply).tokens))
            elif reply[:1] == b"[":
                (only,) = _rendered_list.decode(reply)
                answer = Answer(bytes(only.token_ids), _placed(only.features))
            else:
                only = _rendered.decode(reply)
                answer = Answer(bytes(only.token_ids), _placed(only.features))
        except (msgspec.DecodeError, ValueError, RecursionError):
            self.breaker.failed(worker, not_there=True)
            raise CannotError("ask_failed") from None
        self.breaker.worked(worker)
        return answer


def _placed(features: _Features | None) -> Sequence[Placed]:
    """Items in the order of their places. Raises ValueError where they do not match."""
    if features is None:
        return ()
    found = [
        Placed(identity, place.offset, place.length)
        for modality, identities in features.mm_hashes.items()
        for identity, place in zip(identities, features.mm_placeholders.get(modality, ()), strict=True)
    ]
    return sorted(found, key=lambda item: item.first_token)


def _only(request: InferenceRequest, known: frozenset[str], without_part: frozenset[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, raw in request.fields.items():
        if name in NO_PART or name in without_part or bytes(raw) == _NULL:
            continue
        if name not in known:
            raise CannotError("unknown_field")
        fields[name] = raw
    return fields


def _tokenize_chat(request: InferenceRequest) -> bytes:
    fields = _only(request, _CHAT_FIELDS | frozenset(_AS_KWARGS), _CHAT_WITHOUT_PART)
    if "tools" in fields and bytes(request.fields.get("tool_choice", b"")) == b'"none"':
        raise CannotError("unknown_field")  # whether the tools are shown then is a setting of the worker
    if holds(request.body, b'"reasoning_content"'):
        raise CannotError("unknown_field")  # an older name, which only the chat itself understands
    moved = {name: fields.pop(name) for name in _AS_KWARGS if name in fields}
    if moved:
        try:
            kwargs: dict[str, Any] = dict(_kwargs.decode(fields.get("chat_template_kwargs", b"{}")))
        except (msgspec.DecodeError, RecursionError):
            raise CannotError("invalid") from None
        if "reasoning_effort" in moved and "enable_thinking" not in kwargs:
            kwargs["enable_thinking"] = bytes(moved["reasoning_effort"]) != b'"none"'
        fields["chat_template_kwargs"] = {**kwargs, **moved}
    return _encode(fields)
