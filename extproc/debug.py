"""``/debug/…`` of the admin port, for people who ask why a decision came out as it did. Nothing here changes anything."""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from extproc.cache_directory import CacheDirectory
from extproc.dispatcher import REMEMBERED, Dispatcher
from extproc.errors import ApiError
from extproc.explain import Explainer, Question, Report, snapshot_of
from extproc.next_turn.store import NextTurns
from extproc.observe.observer import Observer
from extproc.prompt import BytesPerToken
from extproc.routing.snapshot import INDEX_BLOCKS
from extproc.tokens.source import TokenSource

ENVELOPE_BYTES = 64 << 10
"""What a question may have beside the request's body: its path and headers."""

_READ_TIMEOUT_S = 30.0
"""In which a question must have come: the next one waits behind it."""


class Debug:
    """One a process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        explainer: Explainer,
        bytes_per_token: BytesPerToken,
        observer: Observer,
        *,
        max_body_bytes: int,
        tokens: TokenSource | None = None,
        directory: CacheDirectory | None = None,
        next_turns: NextTurns | None = None,
    ) -> None:
        """``tokens``, ``directory`` and ``next_turns`` as requests have them."""
        self._dispatcher = dispatcher
        self._observer = observer
        self._explainer = explainer
        self._bytes_per_token = bytes_per_token
        self._tokens = tokens
        self._directory = directory
        self._next_turns = next_turns
        self.max_bytes = max_body_bytes + ENVELOPE_BYTES
        """Of a question: the limit that the server must be made with."""
        self._one_at_a_time = asyncio.Lock()
        """Bodies are large: who asks many questions at once waits, with the bodies still in the sockets."""

    def routes(self) -> list[web.RouteDef]:
        """For the application of the admin port."""
        return [
            web.get("/debug/decisions", self._decisions),
            web.get("/debug/snapshot", self._snapshot),
            web.post("/debug/explain", self._explain),
            web.get("/debug/times", self._times),
        ]

    async def _decisions(self, request: web.Request) -> web.Response:
        text = request.query.get("last", str(REMEMBERED))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= REMEMBERED):
            return _refused(400, "bad_query", f"last: {text[:64]!r} is not a number from 1 to {REMEMBERED}")
        return _json(self._dispatcher.decisions(int(text)))

    async def _times(self, _: web.Request) -> web.Response:
        return _json(self._observer.shown())

    async def _snapshot(self, request: web.Request) -> web.Response:
        wanted = request.query.get("index", "0")
        if wanted not in ("0", "1"):
            return _refused(400, "bad_query", f"index: {wanted[:64]!r} is neither 0 nor 1")
        saved = snapshot_of(
            self._dispatcher.router,
            self._dispatcher.now_s(),
            time.time(),
            self._bytes_per_token,
            index_blocks=INDEX_BLOCKS if wanted == "1" else 0,
        )
        # Megabytes with an index: not on the loop.
        return _json_bytes(await asyncio.to_thread(msgspec.json.encode, saved))

    async def _explain(self, request: web.Request) -> web.Response:
        if (request.content_length or 0) > self.max_bytes:  # before it is waited for
            return self._too_large()
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(_READ_TIMEOUT_S):
                    text = await request.read()
                return _json(await self._report(text))
            except TimeoutError:
                return _refused(408, "question_timeout", f"the question did not come within {_READ_TIMEOUT_S:g} s")
            except web.HTTPRequestEntityTooLarge:
                return self._too_large()
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                return _refused(400, "bad_question", f"not {{path, headers, body}}: {error}")
            except ApiError as error:
                return _json_bytes(error.openai_body(), status=400)

    def _too_large(self) -> web.Response:
        return _refused(413, "request_too_large", f"the question is over {self.max_bytes} bytes")

    async def _report(self, text: bytes) -> Report:
        question = msgspec.json.decode(text, type=Question)
        # Parsing and hashing a long prompt takes a while.
        read = await asyncio.to_thread(self._explainer.read, question, self._bytes_per_token)
        job = read.asked.job
        if self._tokens is not None:
            found = await self._tokens.find(read.asked.request, job.model or "", job.chain.hashes)
            job.token_chain, job.token_chain_whole = found.chain, found.whole
            if found.chain is not None:
                if found.whole:
                    job.tokens = max(found.chain.tokens, 1)
                if self._next_turns is not None and found.whole and not found.media and job.handoff:
                    job.next_turn = self._next_turns.peek(found.chain, job.model or "")
                if self._directory is not None:
                    job.stored_tokens = await self._directory.lookup(found.chain, job.model or "")
        return self._explainer.by_router(read, self._dispatcher.router, self._dispatcher.now_s())


def _json(value: object) -> web.Response:
    return _json_bytes(msgspec.json.encode(value))


def _json_bytes(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refused(status: int, code: str, message: str) -> web.Response:
    return _json_bytes(msgspec.json.encode({"error": {"message": message, "code": code}}), status)
