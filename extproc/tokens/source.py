"""Request -> its chain of token ids, from whichever knows them first, within a bound. One for all requests of a process.

What takes long runs in threads of its own. A request that would wait too long goes on without, and what was begun for it is
finished all the same, for the next one.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from extproc.find import holds
from extproc.inference import InferenceRequest
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment
from extproc.prompt import PromptSettings, Text, text_of, token_ids_sent
from extproc.routing.pool import Pool, Role
from extproc.routing.token_chain import Placed, TokenChain
from extproc.tls.workers import PLAIN, WorkerLink
from extproc.tokens.adapters import parent_of
from extproc.tokens.ask import Answer, Asker
from extproc.tokens.cache import Pieces
from extproc.tokens.conversation import CannotError
from extproc.tokens.identity import prompt_key
from extproc.tokens.ids import AT_ONCE_BYTES, unpack
from extproc.tokens.learned import Beginning, Memory, Shape, common
from extproc.tokens.local import LocalTokenizer
from extproc.tokens.settings import TokenSettings
from extproc.tokens.tokenizer import FolderError
from extproc.tokens.trust import Trust

IDS, LEARNED, TOKENIZER, WORKER, BEGINNING, NONE = "ids", "learned", "tokenizer", "worker", "learned_prefix", "none"
"""Where a chain came from."""

_MEDIA_BY_KEY: Final = (b'_url"', b'_embeds"', b'_audio"', b'image_pil"')
"""In parts that are not text and need no type. In a text that only speaks of them, a quote has a backslash before it."""

_TYPE: Final = b'"type"'
_MEDIA_BY_TYPE: Final = (b'"image"', b'_image"', b'"file"', b'_file"', b'"document"')
"""In other parts that are not text."""

_THOUGHTS: Final = (b'"reasoning"', b'"reasoning_content"', b"think>")
"""A template may leave thoughts of earlier turns out when another turn comes."""

_AT_ONCE_BYTES: Final = 256 << 10
"""A larger body is looked through by a thread: that takes 3 µs a kilobyte."""

_TURNS: Final = {Treatment.CHAT: "messages", Treatment.MESSAGES: "messages", Treatment.RESPONSES: "input"}
"""Where media can stand; the prompt of the completions API has no parts."""

_CUTS: Final = ("truncate_prompt_tokens", "prompt_embeds")
"""Fields after which a prompt is not what its text says."""

_LEARNING_BYTES: Final = 64 << 20
"""Replies that wait for a thread."""

_null = b"null"
_salt_decoder = msgspec.json.Decoder(str)


class Wanted:
    """One request's token ids: what is asked, and what was found."""

    __slots__ = (
        *("beginning", "blocks", "chain", "circumstances", "key", "larger", "lora", "media", "model", "request", "rest"),
        *("salt", "shape", "source", "text", "until_s", "whole"),
    )

    def __init__(self, request: InferenceRequest, model: str, until_s: float) -> None:
        self.request = request
        self.model = model
        """The name that the engine gets."""
        self.lora: str | None = None
        self.salt: str | None = None
        self.circumstances = False
        """Whether adapter, salt and media are known; where False, what stands there is no more than the beginning."""
        self.key = b""
        self.blocks: array[int] = _NO_BLOCKS
        """Hashes of its text's blocks; none where the text says too little."""
        self.rest = b""
        """Of the text, behind the last of them."""
        self.media = False
        """It is not all text."""
        self.text: Text = b""
        self.larger = False
        """Rendered, it may have more bytes than in the request."""
        self.shape: Shape | None = None
        self.beginning: Beginning | None = None
        self.chain: TokenChain | None = None
        self.source = NONE
        self.whole = True
        """False: the chain is only the beginning."""
        self.until_s = until_s
        """So long it waits, by the event loop's clock, whatever is tried for it."""


_NO_BLOCKS: array[int] = array("Q")


class TokenSource:
    """Open it before the first request, and close it in the end."""

    def __init__(
        self,
        settings: TokenSettings,
        *,
        pool: Pool,
        prompts: PromptSettings,
        metrics: Metrics,
        log: Logger,
        own_headers: Mapping[str, str],
        link: WorkerLink = PLAIN,
        block_sizes: Callable[[], Sequence[int]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``prompts``: how the chains over text are made. ``block_sizes`` of the workers, in tokens: the keys for these are
        made beside the event loop. ``own_headers``: see :mod:`extproc.worker_key`."""
        self._settings = settings
        self._pool = pool
        self._prompts = prompts
        self._metrics = metrics
        self._log = log
        self._block_sizes = block_sizes
        self._clock = clock
        self._timeout_s = settings.timeout_ms / 1e3
        share = settings.cache_bytes // 2 if settings.models else settings.cache_bytes
        self._pieces = Pieces(settings.cache_bytes - share)
        self._memory = Memory(share, keep_s=settings.keep_s, block_bytes=prompts.block_bytes, clock=clock)
        self._trust = Trust(clock)
        self._tokenizers: dict[str, LocalTokenizer] = {}
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="tokens")
        self._asker = None
        if settings.ask_workers != "off":
            self._asker = Asker(
                settings.ask_workers,
                link=link,
                own_headers=own_headers,
                workers=self._workers,
                # What was begun for a request that has gone on serves the next one.
                timeout_s=max(10 * self._timeout_s, 1.0),
                clock=clock,
            )
        self._under_way: set[asyncio.Future[Any]] = set()
        self._learning_bytes = 0
        metrics.token_cache_bytes.labels("learned").set_function(lambda: self._memory.bytes)
        metrics.token_cache_bytes.labels("pieces").set_function(lambda: self._pieces.bytes)
        metrics.token_cache_max_bytes.labels("learned").set(share)
        metrics.token_cache_max_bytes.labels("pieces").set(settings.cache_bytes - share)
        metrics.token_waiting.set_function(lambda: len(self._under_way))

    async def open(self) -> None:
        """Read the tokenizers. Raises FolderError, which names the model."""
        loop = asyncio.get_running_loop()
        for model, settings in self._settings.models.items():
            started_s = self._clock()
            try:
                self._tokenizers[model] = await loop.run_in_executor(self._threads, LocalTokenizer, settings, self._pieces)
            except ImportError as error:
                raise FolderError(f"tokens.models: {error}: pip install 'kv-baton[tokens]'") from None
            except FolderError as error:
                raise FolderError(f"tokens.models.{model}: {error}") from None
            self._log.info("tokenizer_read", model=model, folder=settings.folder, seconds=round(self._clock() - started_s, 2))
        if self._asker is not None:
            await self._asker.__aenter__()

    async def close(self) -> None:
        """Nothing goes on after this."""
        for each in list(self._under_way):
            each.cancel()
        if self._asker is not None:
            await self._asker.__aexit__()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "models": sorted(self._tokenizers),
            "learned_prompts": len(self._memory),
            "learned_bytes": self._memory.bytes,
            "pieces": len(self._pieces),
            "pieces_bytes": self._pieces.bytes,
            "distrusted": self._trust.distrusted(),
            "workers_left_alone": 0 if self._asker is None else self._asker.breaker.open,
        }

    # -- before the decision -----------------------------------------------------------------------------------------------

    async def find(self, request: InferenceRequest, model: str, blocks: array[int]) -> Wanted:
        """The token ids of a prompt, within the bound. ``model`` is the engine's name, ``blocks`` are the hashes of its text's
        blocks. Never raises for what a client sent."""
        started_s = self._clock()
        wanted = Wanted(request, model, asyncio.get_running_loop().time() + self._timeout_s)
        try:
            await self._look(wanted, blocks)
        except CannotError as error:
            self._without(error.reason)
        if wanted.chain is None:
            self._begin_like(wanted)
        self._metrics.token_chains.inc(wanted.source)
        self._metrics.token_chain_seconds.observe(self._clock() - started_s, wanted.source)
        return wanted

    async def _look(self, wanted: Wanted, blocks: array[int]) -> None:
        request = wanted.request
        for name in _CUTS:
            if bytes(request.fields.get(name, _null)) != _null:
                raise CannotError("unknown_field")
        parent = parent_of(self._pool, wanted.model)
        wanted.lora = None if parent is None else wanted.model
        wanted.salt = _salt(request)
        sent = token_ids_sent(request)
        if sent:
            wanted.circumstances = True
            await self._sent(wanted, bytes(sent))
            return
        if len(request.body) <= _AT_ONCE_BYTES:
            self._read(wanted, blocks)
        else:
            await self._within(wanted, self._in_thread(self._read, wanted, blocks))
        if not wanted.media:
            chain = self._memory.seen(wanted.key)
            if chain is not None and self._trust.has(LEARNED, wanted.model):
                self._found(wanted, chain, LEARNED)
                return
            if wanted.shape is not None:
                inside = request.treatment is Treatment.COMPLETIONS
                wanted.beginning = self._memory.beginning(
                    wanted.blocks, wanted.text, goes_on_inside=inside, larger=wanted.larger
                )
            wanted.text = b""  # which may be a copy of the whole body
        tokenizer = self._tokenizers.get(wanted.model) or self._tokenizers.get(parent or "")
        reason = "no_source"
        if tokenizer is not None:
            try:
                await self._tokenised(wanted, tokenizer)
                return
            except CannotError as error:
                if self._asker is None or error.reason == "timeout":
                    raise  # there is no time left to ask
                reason = error.reason
        if self._asker is None:
            raise CannotError(reason)
        await self._asked(wanted, self._asker)

    def _read(self, wanted: Wanted, blocks: array[int]) -> None:
        """Look through the text. Raises CannotError."""
        request = wanted.request
        wanted.media = _has_media(request)
        wanted.circumstances = True
        if wanted.media:
            return
        text = wanted.text = text_of(request, self._prompts)
        if not text:
            raise CannotError("invalid")
        wanted.key = prompt_key(request, wanted.model)
        if self._settings.learn_prefixes and not any(holds(request.body, mark) for mark in _THOUGHTS):
            tools = "tools" in request.fields or holds(request.body, b'"tool_calls"')
            wanted.larger = tools or "documents" in request.fields
            wanted.shape = Shape(request.treatment, wanted.model, tools)
        full_bytes = len(blocks) * self._prompts.block_bytes
        if len(text) - full_bytes < self._prompts.block_bytes:  # else the chain was cut short
            wanted.blocks, wanted.rest = blocks, bytes(text[full_bytes:])

    async def _sent(self, wanted: Wanted, listed: bytes) -> None:
        if len(listed) <= AT_ONCE_BYTES:
            ids = unpack(listed)
        else:
            ids = await self._within(wanted, self._in_thread(unpack, listed))
        if not ids:
            raise CannotError("invalid")
        await self._make(wanted, ids, IDS)

    async def _tokenised(self, wanted: Wanted, tokenizer: LocalTokenizer) -> None:
        if wanted.media:
            raise CannotError("multimodal")
        if not self._trust.has(TOKENIZER, wanted.model):
            raise CannotError("distrusted")
        sizes = self._block_sizes()

        def work() -> TokenChain:
            return _chain(tokenizer.ids(wanted.request), wanted, sizes)

        chain = await self._within(wanted, self._in_thread(work))
        self._found(wanted, chain, TOKENIZER)
        if self._settings.learn:
            self._learn(wanted, chain)

    async def _asked(self, wanted: Wanted, asker: Asker) -> None:
        if not self._trust.has(WORKER, wanted.model):
            raise CannotError("distrusted")

        async def work() -> TokenChain:
            answer: Answer = await asker.ids(wanted.request, wanted.model, media=wanted.media)
            ids = unpack(answer.listed) if len(answer.listed) <= AT_ONCE_BYTES else await self._in_thread(unpack, answer.listed)
            if not ids:
                raise CannotError("ask_failed")
            chain = TokenChain(ids, lora=wanted.lora, cache_salt=wanted.salt, items=tuple(answer.items))
            if self._settings.learn and not wanted.media:
                self._learn(wanted, chain)
            return chain

        chain = await self._within(wanted, asyncio.ensure_future(work()))
        self._found(wanted, chain, WORKER)

    async def _make(self, wanted: Wanted, ids: array[int], source: str) -> None:
        sizes = self._block_sizes()
        if len(ids) * ids.itemsize <= AT_ONCE_BYTES:
            self._found(wanted, _chain(ids, wanted, sizes), source)
        else:
            self._found(wanted, await self._within(wanted, self._in_thread(_chain, ids, wanted, sizes)), source)

    def _begin_like(self, wanted: Wanted) -> None:
        if wanted.beginning is None or wanted.shape is None:
            return
        tokens = self._memory.relied_upon(wanted.shape, wanted.beginning)
        if tokens:
            wanted.whole = False
            self._found(wanted, wanted.beginning.earlier.chain.beginning(tokens), BEGINNING)

    def _found(self, wanted: Wanted, chain: TokenChain, source: str) -> None:
        wanted.chain, wanted.source = chain, source

    def _without(self, reason: str) -> None:
        self._metrics.token_chain_missing.inc(reason)

    # -- waiting, with a bound ---------------------------------------------------------------------------------------------

    def _in_thread(self, work: Callable[..., Any], *given: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    async def _within(self, wanted: Wanted, work: asyncio.Future[Any]) -> Any:
        """The result of ``work``, which goes on by itself where that takes too long. Raises CannotError."""
        if len(self._under_way) >= self._settings.max_waiting:
            work.cancel()
            raise CannotError("busy")
        self._under_way.add(work)
        work.add_done_callback(self._ended)
        left_s = wanted.until_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait((work,), timeout=max(0.0, left_s))
        if not done:
            raise CannotError("timeout")
        if work.cancelled():
            raise CannotError("busy")
        error = work.exception()
        if error is not None and not isinstance(error, CannotError):
            self._log.error("token_ids_failed", why=f"{type(error).__name__}: {error}")
            raise CannotError("failed") from None
        return work.result()

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # seen, also where nobody waits any more

    # -- after the prefill -------------------------------------------------------------------------------------------------

    def replied(self, wanted: Wanted, listed: bytes | None) -> None:
        """The engine's own ids of the prompt, a JSON list; None: it sent none."""
        if listed is None or wanted.source == IDS or wanted.media or not wanted.key:
            return
        compare = wanted.source in (LEARNED, TOKENIZER, WORKER) and self._trust.wants(wanted.source, wanted.model)
        teach = self._settings.learn and wanted.source in (NONE, BEGINNING)
        if not compare and not teach:
            return
        if len(listed) <= AT_ONCE_BYTES:
            self._told(wanted, *_compared(wanted, unpack(listed), self._block_sizes()))
            return
        if self._learning_bytes + len(listed) > _LEARNING_BYTES:
            self._metrics.token_lessons.inc("dropped")
            return
        self._learning_bytes += len(listed)
        sizes = self._block_sizes()

        def done(future: asyncio.Future[Any]) -> None:
            self._learning_bytes -= len(listed)
            if not future.cancelled() and future.exception() is None:
                self._told(wanted, *future.result())

        self._in_thread(lambda: _compared(wanted, unpack(listed), sizes)).add_done_callback(done)

    def _told(self, wanted: Wanted, chain: TokenChain | None, same: bool, shared_tokens: int) -> None:
        if chain is None:
            self._metrics.token_lessons.inc("unreadable")
            return
        source, model = wanted.source, wanted.model
        if source != NONE:
            self._metrics.token_chains_compared.inc(source, "same" if same else "other")
            if source != BEGINNING:
                self._trust.compared(source, model, same=same)
            if not same:
                self._log.error("token_ids_differ", source=source, model=model, ours=_tokens(wanted.chain), engine=chain.tokens)
                if source in (LEARNED, WORKER):
                    self._metrics.token_lessons.inc("forgotten", by=float(self._memory.forget(model)))
        if wanted.beginning is not None and wanted.shape is not None:
            held = self._memory.proved(wanted.shape, wanted.beginning, shared_tokens)
            self._metrics.token_beginnings.inc("held" if held else "other")
        if self._settings.learn:
            self._learn(wanted, chain)
            self._metrics.token_lessons.inc("kept")

    def _learn(self, wanted: Wanted, chain: TokenChain) -> None:
        self._memory.learn(wanted.key, wanted.model, chain, wanted.blocks, wanted.rest)

    def _workers(self, model: str) -> list[str]:
        return [each.address for each in self._pool.live(Role.PREFILL) if each.serves(model)]


def _tokens(chain: TokenChain | None) -> int:
    return 0 if chain is None else chain.tokens


def _salt(request: InferenceRequest) -> str | None:
    raw = request.fields.get("cache_salt")
    if raw is None or bytes(raw) == _null:
        return None
    try:
        return _salt_decoder.decode(raw)
    except msgspec.DecodeError:
        raise CannotError("invalid") from None


def _has_media(request: InferenceRequest) -> bool:
    """Whether something in it may not be text."""
    name = _TURNS.get(request.treatment)
    if name is None or name not in request.fields:
        return False
    turns = bytes(request.fields[name])
    if any(holds(turns, mark) for mark in _MEDIA_BY_KEY):
        return True
    return holds(turns, _TYPE) and any(holds(turns, mark) for mark in _MEDIA_BY_TYPE)


def _chain(ids: array[int], wanted: Wanted, sizes: Sequence[int], items: Sequence[Placed] = ()) -> TokenChain:
    chain = TokenChain(ids, lora=wanted.lora, cache_salt=wanted.salt, items=items)
    for size in sizes:
        chain.keys(size)
    return chain


def _compared(wanted: Wanted, ids: array[int] | None, sizes: Sequence[int]) -> tuple[TokenChain | None, bool, int]:
    """The engine's ids as a chain, whether ours are the same or the beginning of it, how many the earlier prompt shares."""
    if not ids:
        return None, False, 0
    ours = None if wanted.chain is None else wanted.chain.token_ids
    same = ours is None or (ours == ids if wanted.whole else ours == ids[: len(ours)])
    shared = 0 if wanted.beginning is None else common(wanted.beginning.earlier.chain.token_ids, ids)
    return _chain(ids, wanted, sizes), same, shared
