"""Blocks that decode workers keep, each for one prompt that begins with exactly their tokens. Event loop only; no I/O.

A prompt is compared token by token, with its adapter, its salt and what is in it beside text; block keys only find whom to
compare it with. Nothing is ever given twice.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from extproc.handoff import Handoff, HandoffError
from extproc.handoff.nixl_turn import KeptBlocks
from extproc.handoff.remote_hosts import RemoteHosts
from extproc.next_turn.settings import NextTurn
from extproc.observe.instruments import Tally
from extproc.routing.job import Offer
from extproc.routing.pairs import Pairs
from extproc.routing.pool import Endpoint, Pool, Role
from extproc.routing.token_chain import TokenChain

_KEY_TOKENS: Final = 64
"""Block size of the keys by which a prompt finds the turns that it may continue. Shorter turns are not kept."""

_ENTRY_BYTES: Final = 1000

_LEFT_ALONE_S, _LEFT_ALONE_MAX_S = 60.0, 3600.0
"""A prefill worker whose prefill failed with blocks to read gets none for so long, and twice as long each time. One without
`bidirectional_kv_xfer` never answers such a prefill (vLLM 0.32)."""


class Turn:
    """Blocks that are kept after one answer."""

    __slots__ = ("_prompt_tokens", "blocks", "bytes", "chain", "endpoint", "expires_s", "model", "prompt_key", "tokens")

    def __init__(
        self, blocks: KeptBlocks, chain: TokenChain, prompt_tokens: int, model: str, endpoint: Endpoint, expires_s: float
    ) -> None:
        self.blocks = blocks
        self._prompt_tokens = min(prompt_tokens, chain.tokens)
        self.chain = chain
        """Of exactly the tokens that may be read."""
        self.tokens = chain.tokens
        self.model = model
        self.endpoint = endpoint
        self.expires_s = expires_s
        keys = chain.keys(_KEY_TOKENS)
        full = self._prompt_tokens // _KEY_TOKENS
        self.prompt_key = keys[full - 1] if full else None
        """Of its prompt alone."""
        self.bytes = _ENTRY_BYTES + 4 * chain.tokens

    @property
    def key(self) -> int:
        """Of its last full block."""
        return self.chain.keys(_KEY_TOKENS)[-1]

    @property
    def offer(self) -> Offer:
        """What the decision is told."""
        return Offer(self.endpoint.address, self.tokens)

    def began_like(self, prompt: TokenChain) -> bool:
        """Whether ``prompt`` begins with the prompt that was answered, whatever it makes of the answer."""
        count = self._prompt_tokens
        return prompt.tokens >= count and prompt.token_ids[:count] == self.chain.token_ids[:count]

    def continues(self, prompt: TokenChain, model: str) -> bool:
        """Whether ``prompt`` begins with exactly its tokens, for the same model, in the same circumstances."""
        own, count = self.chain, self.tokens
        if prompt.tokens <= count or model != self.model or (prompt.lora, prompt.cache_salt) != (own.lora, own.cache_salt):
            return False
        inside = tuple(item for item in prompt.items if item.first_token < count)
        if inside != own.items or any(item.first_token + item.tokens > count for item in inside):
            return False
        return prompt.token_ids[:count] == own.token_ids


class NextTurns:
    """One a process."""

    def __init__(
        self,
        settings: NextTurn,
        pool: Pool,
        back: Pairs,
        *,
        hosts: RemoteHosts,
        not_before: Callable[[], float],
        count: Tally,
        release: Callable[[Handoff], object],
        release_later: Callable[[Handoff], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``back``: what is known of decode workers that prefill workers read from. ``hosts``: where workers may say that their
        blocks are. ``not_before``: what is read now was not there yet at that time (:mod:`extproc.observe.pulse`). ``release``
        lets a decode worker let go of blocks that surely nobody reads, ``release_later`` in a while."""
        self._settings = settings
        self._pool = pool
        self._back = back
        back.on_forget = self.forget
        self.hosts = hosts
        self._not_before = not_before
        self._count = count
        self._release = release
        self._release_later = release_later
        self._clock = clock
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        """By the engine's own name of the request, in the order of their end."""
        self._by_key: dict[int, dict[str, Turn]] = {}
        self._by_prompt: dict[int, dict[str, Turn]] = {}
        self._engines: dict[str, str] = {}
        """Decode worker -> its engine."""
        self._left_alone: dict[str, tuple[int, float]] = {}
        """Prefill worker -> failures in a row, and until when it gets nothing to read."""
        self.bytes = 0

    @property
    def timeout_s(self) -> float:
        """Of a prefill that reads."""
        return self._settings.timeout_s

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, outcome: str) -> None:
        """Count what became of an answer or a prompt; one of :data:`~extproc.next_turn.outcomes.OUTCOMES`."""
        self._count.inc(outcome)

    def since_s(self, sent_s: float) -> float:
        """A decode worker, which got its request at ``sent_s``, did not begin to keep what is read now before this."""
        return max(sent_s, self._not_before())

    # -- after an answer ---------------------------------------------------------------------------------------------------

    def keep(
        self,
        blocks: KeptBlocks,
        ids: array[int],
        prompt_tokens: int,
        *,
        model: str,
        lora: str | None,
        cache_salt: str | None,
        since_s: float,
    ) -> None:
        """An answer named ``blocks``, which hold the tokens ``ids``: those of its prompt, and then its own.

        ``since_s`` of it.
        """
        self._sweep()
        endpoint = self._pool.get(blocks.decode)
        if endpoint is None or not endpoint.live or endpoint.leaving:
            self.note("gone")
            return
        if self._engines.get(blocks.decode, blocks.engine_id) != blocks.engine_id:
            self.forget(blocks.decode)
        self._engines[blocks.decode] = blocks.engine_id
        # The last token that was generated may not be written yet.
        tokens = min(blocks.tokens, len(ids) - 1)
        if tokens < _KEY_TOKENS:
            self.give_back(blocks.release(), "unusable")
            return
        chain = TokenChain(ids[:tokens], lora=lora, cache_salt=cache_salt)
        turn = Turn(blocks, chain, prompt_tokens, model, endpoint, since_s + self._settings.ttl_s - self._settings.margin_s)
        if turn.bytes > self._settings.max_bytes or turn.expires_s <= self._clock():
            self.give_back(blocks.release(), "unusable")
            return
        name = _name(turn)
        if name in self._turns:
            return
        self._turns[name] = turn
        self.bytes += turn.bytes
        self._by_key.setdefault(turn.key, {})[name] = turn
        if turn.prompt_key is not None:
            self._by_prompt.setdefault(turn.prompt_key, {})[name] = turn
        self.note("kept")
        while self.bytes > self._settings.max_bytes or len(self._turns) > self._settings.max_conversations:
            oldest = next(iter(self._turns.values()))
            self._drop(oldest)
            self.give_back(oldest.blocks.release(), "evicted")

    def give_back(self, handoff: Handoff | None, outcome: str) -> None:
        """Nobody will read the blocks that it names. None: nobody can give them back either."""
        self.note(outcome)
        if handoff is not None:
            self._release(handoff)

    # -- for a prompt ------------------------------------------------------------------------------------------------------

    def peek(self, prompt: TokenChain | None, model: str) -> Offer | None:
        """What a prompt would be offered. Nothing changes, and nothing is counted."""
        for key in () if prompt is None else reversed(prompt.keys(_KEY_TOKENS)):
            for turn in reversed(self._by_key.get(key, {}).values()):
                if prompt is not None and turn.continues(prompt, model) and self._lost(turn) is None:
                    return self.offer(turn)
        return None

    def find(self, prompt: TokenChain | None, model: str) -> Turn | None:
        """The longest turn that ``prompt`` continues; None where there is none, which is counted where it should not be."""
        self._sweep()
        if not self._turns:
            return None
        if prompt is None:
            self.note("prompt_unknown")
            return None
        keys, diverged = prompt.keys(_KEY_TOKENS), False
        for key in reversed(keys):
            for turn in reversed(tuple(self._by_key.get(key, {}).values())):
                if not turn.continues(prompt, model):
                    continue
                lost = self._lost(turn)
                if lost is None:
                    return turn
                self._drop(turn)
                self.note(lost)
            diverged = diverged or any(turn.began_like(prompt) for turn in self._by_prompt.get(key, {}).values())
        if diverged:
            self.note("diverged")
        return None

    def offer(self, turn: Turn) -> Offer:
        """What the decision is told of it."""
        now_s = self._clock()
        alone = frozenset(address for address, (_, until_s) in self._left_alone.items() if until_s > now_s)
        return turn.offer._replace(not_for=alone)

    def take(self, turn: Turn, prefill: Endpoint, prompt_token_ids: bytes | None) -> bytes | None:
        """``kv_transfer_params`` for a prefill on ``prefill``, once; None: it computes all of it. ``prompt_token_ids`` as
        :meth:`~extproc.handoff.nixl_turn.KeptBlocks.prefill_params` has them."""
        self._sweep()
        if self._turns.get(_name(turn)) is not turn:
            return None  # another prompt has it, or its time is up
        self._drop(turn)
        lost = self._lost(turn)
        if lost is not None:
            self.note(lost)
            return None
        sizes = {_block_tokens(turn.endpoint), _block_tokens(prefill)}
        size = sizes.pop()
        if sizes or not size or prefill is turn.endpoint:
            self.give_back(turn.blocks.release(), "unusable")
            return None
        try:
            return turn.blocks.prefill_params(turn.tokens, size, prompt_token_ids)
        except HandoffError:
            self.give_back(turn.blocks.release(), "unusable")
            return None

    def went_well(self, decode: str, prefill: str, *, read: bool) -> None:
        """The prefill that was given blocks of ``decode`` replied. ``read``: as far as is known, it has read them."""
        self._left_alone.pop(prefill, None)
        self.note("read" if read else "computed")
        if read:
            self._back.succeeded(decode, prefill)

    def failed(self, turn: Turn, prefill: str, outcome: str) -> None:
        """It did not: it `failed`, was `refused` or `cancelled`."""
        self.note("failed")
        if outcome == "refused":
            self._release(turn.blocks.release())  # it was not begun; of the others nobody knows whether they read
        if outcome == "failed":
            self._back.failed(turn.endpoint.address, prefill, self._clock())
            failures = self._left_alone.get(prefill, (0, 0.0))[0] + 1
            alone_s = min(_LEFT_ALONE_S * 2.0 ** (failures - 1), _LEFT_ALONE_MAX_S)
            self._left_alone[prefill] = (failures, self._clock() + alone_s)

    def unused(self, turn: Turn, outcome: str) -> None:
        """The prompt that continues it was placed without them, and the next one will not be its continuation."""
        if self._turns.get(_name(turn)) is turn:
            self._drop(turn)
            self.note(outcome)
            # Its decode worker may be about to compute the next turn on them.
            self._release_later(turn.blocks.release())

    # -- the end of it -----------------------------------------------------------------------------------------------------

    def forget(self, address: str) -> None:
        """The worker at ``address`` is gone, or its engine is a new one: blocks of the old one are nobody's."""
        self._engines.pop(address, None)
        self._left_alone.pop(address, None)
        for turn in [turn for turn in self._turns.values() if turn.endpoint.address == address]:
            self._drop(turn)
            self.note("gone")

    def _sweep(self) -> None:
        """What the decode workers have let go by now."""
        now_s = self._clock()
        while self._turns:
            oldest = next(iter(self._turns.values()))
            if oldest.expires_s > now_s:
                return
            self._drop(oldest)
            self.note("expired")

    def _lost(self, turn: Turn) -> str | None:
        """Why its blocks are no longer where they were; None: they are."""
        if turn.expires_s <= self._clock():
            return "expired"
        endpoint = turn.endpoint
        there = self._pool.get(endpoint.address) is endpoint and endpoint.live and not endpoint.leaving
        same = self._engines.get(endpoint.address) == turn.blocks.engine_id
        return None if there and same and Role.DECODE in endpoint.roles else "gone"

    def _drop(self, turn: Turn) -> None:
        name = _name(turn)
        del self._turns[name]
        self.bytes -= turn.bytes
        for index, key in ((self._by_key, turn.key), (self._by_prompt, turn.prompt_key)):
            if key is not None and key in index:
                index[key].pop(name, None)
                if not index[key]:
                    del index[key]


def _name(turn: Turn) -> str:
    return f"{turn.blocks.engine_id} {turn.blocks.request_id}"


def _block_tokens(endpoint: Endpoint) -> int | None:
    """Tokens in a KV block of a worker; None: it has not said."""
    return None if endpoint.load is None else endpoint.load.block_tokens
