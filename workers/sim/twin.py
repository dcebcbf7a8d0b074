"""A twin of the simulated engine for a virtual clock: the same scheduling and arithmetic, without tokens, tasks or network.

:class:`workers.sim.core.Core` moves every token and knows what each block holds; this one only counts, so that minutes of
traffic pass in seconds. What makes it cheap: a step that only decodes costs the same however many sequences it has, because
their number and the sum of their contexts are all that its duration depends on; when a sequence ends, or needs its next block,
is known in steps from the moment its decoding starts. At most one sequence is in the middle of its prefill, the last one that
was admitted, because it takes all tokens that a step has left.

Left out: leases, failures, aborted requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.goodput import percentile
from workers.sim.timing import Profile
from workers.sim.twin_cache import Block, TwinCache
from workers.sim.twin_link import Wires
from workers.sim.twin_tier import TwinTier


@dataclass(frozen=True)
class TwinConfig:
    """The limits of one engine, as those of :class:`workers.sim.core.CoreConfig`."""

    block_tokens: int = 512
    num_blocks: int = 4_900
    """All of them can be used; the engine's own count has one more, the null block."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    chunked: bool = True
    """False: as vLLM was before it cut prompts into chunks. A step is of whole prompts, as many as fit into
    ``max_num_batched_tokens``, or of decodes; prompts go first, and no stream gets a token meanwhile."""

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError("max_num_seqs: not more than max_num_batched_tokens, or a step could not decode every sequence")


class Done(NamedTuple):
    """A request ended."""

    name: str
    at_s: float
    scheduled_s: float
    """When it got its blocks."""
    first_token_s: float
    cached_tokens: int
    itl_p99_s: float | None
    """None: fewer than two tokens."""


class Pulled(NamedTuple):
    """The KV of a request has been read: its prefill worker may let go (:meth:`TwinEngine.release`)."""

    name: str
    at_s: float
    peer: str
    tokens: int
    transfer_s: float
    """From the request for the blocks to their arrival, handshake included."""


Event = Done | Pulled


class Gaps(NamedTuple):
    """So many streams waited as long for their next token."""

    gap_s: float
    streams: int


class TwinLoad(NamedTuple):
    """What the engine's metrics would say."""

    running: int
    waiting: int
    """Those whose KV is on its way included, as vLLM counts them."""
    kv_usage: float
    gaps: int
    """Times between two tokens, since the start."""
    gaps_s: float
    """All of them together; what preemption adds is left out."""
    transfers: int
    """KV transfers received, since the start."""
    transfers_s: float
    transferred_tokens: int


class _Sequence:
    __slots__ = (
        "answer_tokens",
        "blocks",
        "cached_tokens",
        "computed",
        "epoch",
        "first_token_s",
        "generated",
        "joined_s",
        "joined_step",
        "keys",
        "load_blocks",
        "name",
        "peer",
        "pin",
        "prompt_tokens",
        "registered",
        "scheduled_s",
        "spans",
    )

    def __init__(
        self, name: str, keys: Sequence[int], prompt_tokens: int, answer_tokens: int, *, pin: bool, peer: str | None
    ) -> None:
        self.name = name
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.pin = pin
        self.peer = peer
        self.blocks: list[Block] = []
        self.registered = 0
        self.computed = 0
        self.generated = 0
        self.cached_tokens = 0
        self.scheduled_s: float | None = None
        self.first_token_s = 0.0
        self.joined_step = 0
        self.joined_s = 0.0
        """When it got the token of ``joined_step``; later than that step's end where prompts stall the decodes."""
        self.load_blocks = 0
        """To be read from the tier behind the cache before it can run."""
        self.epoch = 0
        """What was planned for it in an earlier one is void: it was preempted since."""
        self.spans: list[tuple[int, int, float]] = []
        """First and last step of each stretch in which every step gave it a token, and when the first token came."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def last_registered(self) -> int | None:
        """The key of the last block that the cache was told of; None: there is none, or it has no keys."""
        return self.keys[self.registered - 1] if 0 < self.registered <= len(self.keys) else None


class TwinEngine:
    """One engine. Time only moves in :meth:`advance`; nothing may be submitted before what it was advanced to."""

    def __init__(
        self, name: str, config: TwinConfig, profile: Profile, *, wires: Wires | None = None, tier: TwinTier | None = None
    ) -> None:
        """``wires``: ports ``"{name} in"`` and ``"{peer} out"`` that transfers share, looked after by the caller, who says what
        came with :meth:`arrived`; None: each transfer takes what the profile says. ``tier``: a cache behind this one, read
        through the ports ``"{name} load"`` and ``"tier"``; without wires it is this engine's alone, and read by one prompt
        after the other."""
        self.name = name
        self.config = config
        self.profile = profile
        self._wires = wires
        self.tier = tier
        self._tier_free_s = 0.0
        """When the reads from the tier are over that were begun without wires."""
        self.cache = TwinCache(config.num_blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._pulls: list[tuple[float, int, float, _Sequence]] = []
        self._under_way: dict[str, tuple[float, _Sequence]] = {}
        """On the wires, with when each was asked for."""
        self._pinned: dict[str, list[Block]] = {}
        self._known_from_s: dict[str, float] = {}
        self._order = 0
        self._wake_s: float | None = None
        self._step_end_s: float | None = None
        self._ends_s: list[float] = []
        """When each step ended, but for those that gave the decodes nothing."""
        self._prefilling: list[tuple[_Sequence, int]] = []
        """The prefills of the step under way, with their tokens."""
        self._chunked: _Sequence | None = None
        """The one in the middle of its prefill."""
        self._decodes = 0
        self._decode_context_tokens = 0
        self._stalled = False
        """Whether there are decodes that get nothing of the step under way."""
        self._late: dict[str, float] = {}
        """Those that joined the decodes since the last step that gave these a token, and when."""
        self._ending: list[tuple[int, int, int, _Sequence]] = []
        self._growing: list[tuple[int, int, int, _Sequence]] = []
        self._gaps = 0
        self._gaps_s = 0.0
        self._transfers = 0
        self._transfers_s = 0.0
        self._transferred_tokens = 0
        self.preemptions = 0
        self.busy_s = 0.0
        """In steps, since the start."""
        self.kv_peak = 0.0
        """Largest share of the blocks that was in use when a step began."""
        self.gaps: list[Gaps] | None = None
        """All times between two tokens, for whoever sets a list here."""

    # -- from outside ------------------------------------------------------------------------------------------------------

    def submit_prefill(self, name: str, keys: Sequence[int], tokens: int, now_s: float) -> None:
        """The prefill leg of a handoff: one token, and the blocks stay until release(). ``keys``: one a full block."""
        self._submit(_Sequence(name, keys, tokens, 1, pin=True, peer=None), now_s)

    def submit_decode(
        self, name: str, keys: Sequence[int], tokens: int, answer_tokens: int, now_s: float, *, peer: str
    ) -> None:
        """The decode leg: what is not cached here is pulled from ``peer``."""
        self._submit(_Sequence(name, keys, tokens, answer_tokens, pin=False, peer=peer), now_s)

    def submit_whole(self, name: str, keys: Sequence[int], tokens: int, answer_tokens: int, now_s: float) -> None:
        """Prefill and decode here."""
        self._submit(_Sequence(name, keys, tokens, answer_tokens, pin=False, peer=None), now_s)

    def release(self, name: str, now_s: float) -> None:
        """The blocks of a finished prefill leg are not needed any more."""
        self.cache.drop(self._pinned.pop(name))
        self._wake(now_s)

    def arrived(self, name: str, at_s: float) -> None:
        """What it waited for has come over the wires."""
        began_s, sequence = self._under_way.pop(name)
        self._order += 1
        heapq.heappush(self._pulls, (at_s, self._order, began_s, sequence))

    def load(self) -> TwinLoad:
        """What its metrics would say now."""
        return TwinLoad(
            len(self._running),
            len(self._waiting) + len(self._pulls) + len(self._under_way),
            self.cache.usage,
            self._gaps,
            self._gaps_s,
            self._transfers,
            self._transfers_s,
            self._transferred_tokens,
        )

    def next_event_s(self) -> float | None:
        """When something happens next; None: nothing will without a submit() or release()."""
        next_s = self._step_end_s if self._step_end_s is not None else self._wake_s
        if self._pulls and (next_s is None or self._pulls[0][0] < next_s):
            return self._pulls[0][0]
        return next_s

    def advance(self, now_s: float) -> list[Event]:
        """Everything that happens up to ``now_s``, in order."""
        events: list[Event] = []
        while (next_s := self.next_event_s()) is not None and next_s <= now_s:
            while self._pulls and self._pulls[0][0] <= next_s:
                self._end_pull(events)
            if self._step_end_s is not None and self._step_end_s <= next_s:
                self._end_step(events)
            if self._step_end_s is None:
                self._wake_s = None
                self._begin_step(next_s)
        return events

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _submit(self, sequence: _Sequence, now_s: float) -> None:
        if -(-(sequence.prompt_tokens + sequence.answer_tokens) // self.config.block_tokens) > self.config.num_blocks:
            raise ValueError(f"{sequence.name}: {sequence.prompt_tokens} tokens and the answer do not fit into {self.name}")
        longest = self.config.max_num_batched_tokens
        if not self.config.chunked and sequence.prompt_tokens + sequence.answer_tokens > longest:
            raise ValueError(
                f"{sequence.name}: {sequence.prompt_tokens} tokens and the answer are more than the {longest} of a step of "
                f"{self.name}, which does not cut prompts into chunks"
            )
        self._waiting.append(sequence)
        self._wake(now_s)

    def _wake(self, now_s: float) -> None:
        self._wake_s = now_s if self._wake_s is None else min(self._wake_s, now_s)

    def _begin_step(self, now_s: float) -> None:
        if self.config.chunked:
            self._grow_all()
            context_tokens = self._fill(self.config.max_num_batched_tokens - self._decodes, now_s)
        else:
            context_tokens = self._fill(self.config.max_num_batched_tokens, now_s)
            if not self._prefilling:
                self._grow_all()
        if not self._decodes and not self._prefilling:
            return
        self._stalled = not self.config.chunked and bool(self._prefilling) and self._decodes > 0
        decodes = 0 if self._stalled else self._decodes
        step_s = self.profile.step_s(
            prefill_tokens=sum(tokens for _, tokens in self._prefilling),
            prefill_context_tokens=context_tokens,
            decodes=decodes,
            decode_context_tokens=self._decode_context_tokens if decodes else 0,
        )
        self._step_end_s = now_s + step_s
        self.busy_s += step_s
        self.kv_peak = max(self.kv_peak, self.cache.usage)

    def _grow_all(self) -> None:
        """Blocks for the decodes that need one for the next token."""
        step = len(self._ends_s)
        while self._growing and self._growing[0][0] <= step:
            _, _, epoch, growing = heapq.heappop(self._growing)
            if epoch == growing.epoch:
                self._grow(growing, step)

    def _fill(self, budget: int, now_s: float) -> int:
        """Put prefills of up to ``budget`` tokens into the step; the sum of what each of their tokens attends to."""
        self._prefilling = []
        context_tokens = 0
        sequence = self._chunked or self._admit_next(now_s, budget)
        while sequence is not None:
            tokens = min(sequence.total_tokens - sequence.computed, budget)
            self._prefilling.append((sequence, tokens))
            context_tokens += tokens * (2 * sequence.computed + tokens) // 2
            budget -= tokens
            sequence = self._admit_next(now_s, budget) if budget > 0 else None
        self._chunked = None
        return context_tokens

    def _end_step(self, events: list[Event]) -> None:
        assert self._step_end_s is not None
        now_s = self._step_end_s
        self._step_end_s = None
        if self._stalled:
            step = len(self._ends_s) - 1
        else:
            step = len(self._ends_s)
            self._end_decodes(step, now_s, events)
        for sequence, tokens in self._prefilling:
            sequence.computed += tokens
            self._register(sequence)
            if sequence.computed < sequence.total_tokens:
                self._chunked = sequence
                continue
            if not sequence.generated:
                sequence.first_token_s = now_s
            elif self.gaps is not None:
                self.gaps.append(Gaps(now_s - self._last_token_s(sequence), 1))
            sequence.generated += 1
            if sequence.generated >= sequence.answer_tokens:
                sequence.spans.append((step, step, now_s))
                self._finish(sequence, now_s, events)
            else:
                self._join_decodes(sequence, step, now_s)

    def _end_decodes(self, step: int, now_s: float, events: list[Event]) -> None:
        """Each decode has got a token."""
        if self._decodes:
            gap_s = now_s - self._ends_s[-1]
            self._gaps += self._decodes
            self._gaps_s += self._decodes * gap_s
            if self._late:
                self._gaps_s -= sum(joined_s - self._ends_s[-1] for joined_s in self._late.values())
            if self.gaps is not None:
                self.gaps += [Gaps(now_s - joined_s, 1) for joined_s in self._late.values()]
                if self._decodes > len(self._late):
                    self.gaps.append(Gaps(gap_s, self._decodes - len(self._late)))
            self._late.clear()
        self._ends_s.append(now_s)
        self._decode_context_tokens += self._decodes
        while self._ending and self._ending[0][0] <= step:
            _, _, epoch, sequence = heapq.heappop(self._ending)
            if epoch == sequence.epoch:
                self._leave_decodes(sequence, step)
                self._finish(sequence, now_s, events)

    def _admit_next(self, now_s: float, budget: int) -> _Sequence | None:
        """The next sequence that may run in this step. One whose KV must be pulled is sent to get it, and the next one asked.

        Where there are no blocks for the first in the queue, one goes that has its blocks already (its pull is over): it
        could be what the first one waits for.
        """
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            if not self._fits(sequence, budget):
                return None
            if not self._admit(sequence, now_s):
                ready = next((other for other in self._waiting if other.blocks), None)
                if ready is None or not self._fits(ready, budget):
                    return None
                sequence = ready
            self._waiting.remove(sequence)
            if sequence.load_blocks:
                self._begin_load(sequence, now_s)
            elif sequence.peer is None:
                self._running[sequence.name] = sequence
                return sequence
            else:
                self._begin_pull(sequence, now_s)
        return None

    def _fits(self, sequence: _Sequence, budget: int) -> bool:
        """Whether all that is to be computed of it goes into what a step has left; where there are chunks, some always does."""
        if self.config.chunked:
            return True
        computed = sequence.computed if sequence.blocks else self._hit(sequence) * self.config.block_tokens
        return sequence.total_tokens - computed <= budget

    def _usable(self, sequence: _Sequence) -> Sequence[int]:
        """The keys of its blocks that can be had from a cache; the last token is computed in any case, for its logits."""
        if not self.config.prefix_caching:
            return ()
        size = self.config.block_tokens
        return sequence.keys[: min((sequence.total_tokens - 1) // size, sequence.prompt_tokens // size)]

    def _hit(self, sequence: _Sequence) -> int:
        """Blocks of it that are cached here."""
        return self.cache.match(self._usable(sequence))

    def _admit(self, sequence: _Sequence, now_s: float) -> bool:
        if sequence.blocks:
            return True
        size = self.config.block_tokens
        hit = self._hit(sequence)
        held = sequence.keys[:hit]
        self.cache.hold(held)
        fresh = -(-sequence.total_tokens // size) - hit
        if not self.cache.take(fresh):
            self.cache.drop(held)
            return False
        sequence.blocks = [*held, *[None] * fresh]
        sequence.registered = hit
        sequence.computed = hit * size
        if self.tier is not None and sequence.peer is None:
            usable = self._usable(sequence)
            sequence.load_blocks = self.tier.match(usable[hit:])
            self.tier.touch(usable[: hit + sequence.load_blocks])
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
            sequence.cached_tokens = sequence.computed + sequence.load_blocks * size
        return True

    def _begin_pull(self, sequence: _Sequence, now_s: float) -> None:
        assert sequence.peer is not None
        known_s = self._known_from_s.setdefault(sequence.peer, now_s + self.profile.handshake_s)
        begin_s, tokens = max(now_s, known_s), sequence.prompt_tokens - sequence.computed
        if self._wires is not None:
            self._under_way[sequence.name] = now_s, sequence
            ports = f"{sequence.peer} out", f"{self.name} in"
            size_bytes = tokens * self.profile.kv_bytes_a_token * self.profile.kv_copies
            self._wires.begin(self.name, sequence.name, ports, size_bytes, begin_s + self.profile.transfer_overhead_s)
            return
        self._order += 1
        heapq.heappush(self._pulls, (begin_s + self.profile.transfer_s(tokens), self._order, now_s, sequence))

    def _begin_load(self, sequence: _Sequence, now_s: float) -> None:
        """Blocks of the tier are on their way."""
        assert self.tier is not None
        size_bytes = sequence.load_blocks * self.config.block_tokens * self.profile.kv_bytes_a_token * self.profile.kv_copies
        if self._wires is None:
            begin_s = max(now_s, self._tier_free_s)
            self._tier_free_s = begin_s + self.tier.config.overhead_s + size_bytes / self.tier.config.bytes_a_s
            self._order += 1
            heapq.heappush(self._pulls, (self._tier_free_s, self._order, now_s, sequence))
            return
        self._under_way[sequence.name] = now_s, sequence
        ports = "tier", f"{self.name} load"
        self._wires.begin(self.name, sequence.name, ports, size_bytes, now_s + self.tier.config.overhead_s)

    def _end_pull(self, events: list[Event]) -> None:
        ready_s, _, began_s, sequence = heapq.heappop(self._pulls)
        if sequence.load_blocks:
            sequence.computed += sequence.load_blocks * self.config.block_tokens
            sequence.load_blocks = 0
        else:
            events.append(self._pulled(sequence, began_s, ready_s))
        self._register(sequence)
        if sequence.computed == sequence.prompt_tokens:
            sequence.computed -= 1
        self._waiting.appendleft(sequence)
        self._wake(ready_s)

    def _pulled(self, sequence: _Sequence, began_s: float, ready_s: float) -> Pulled:
        assert sequence.peer is not None
        pulled = Pulled(
            sequence.name, ready_s, sequence.peer, sequence.prompt_tokens - sequence.cached_tokens, ready_s - began_s
        )
        self._transfers += 1
        self._transfers_s += pulled.transfer_s
        self._transferred_tokens += pulled.tokens
        sequence.peer = None
        sequence.computed = sequence.prompt_tokens
        return pulled

    def _register(self, sequence: _Sequence) -> None:
        full = min(sequence.computed, sequence.prompt_tokens) // self.config.block_tokens
        if full > sequence.registered and self.config.prefix_caching:
            keys, before = sequence.keys[sequence.registered : full], sequence.last_registered
            self.cache.register(sequence.blocks, sequence.registered, keys, before)
            if self.tier is not None:
                self.tier.store(keys, before)
            sequence.registered = full

    def _join_decodes(self, sequence: _Sequence, step: int, now_s: float) -> None:
        """It has just got a token, in ``step`` or in one after it that counts for none; it gets one in every later step."""
        sequence.joined_step, sequence.joined_s = step, now_s
        if self._stalled:
            self._late[sequence.name] = now_s
        self._decodes += 1
        self._decode_context_tokens += sequence.total_tokens
        self._order += 1
        last_step = step + sequence.answer_tokens - sequence.generated
        heapq.heappush(self._ending, (last_step, self._order, sequence.epoch, sequence))
        self._plan_growth(sequence, last_step)

    def _plan_growth(self, sequence: _Sequence, last_step: int) -> None:
        room = len(sequence.blocks) * self.config.block_tokens - sequence.total_tokens
        grow_step = sequence.joined_step + 2 + room
        if grow_step <= last_step:
            self._order += 1
            heapq.heappush(self._growing, (grow_step, self._order, sequence.epoch, sequence))

    def _grow(self, sequence: _Sequence, step: int) -> None:
        """One more block for a decode; the last running sequences make room for it."""
        while not self.cache.take(1):
            name = next(reversed(self._running))
            victim = self._running[name]
            self._preempt(victim, step)
            if victim is sequence:
                return
        sequence.blocks.append(None)
        self._plan_growth(sequence, sequence.joined_step + sequence.answer_tokens - sequence.generated)

    def _leave_decodes(self, sequence: _Sequence, last_step: int) -> None:
        """Count what it got from the step it joined in to ``last_step``."""
        sequence.generated += last_step - sequence.joined_step
        sequence.spans.append((sequence.joined_step, last_step, sequence.joined_s))
        self._late.pop(sequence.name, None)
        self._decodes -= 1
        self._decode_context_tokens -= sequence.total_tokens

    def _preempt(self, victim: _Sequence, step: int) -> None:
        del self._running[victim.name]
        if victim is self._chunked:
            self._chunked = None
        else:
            self._leave_decodes(victim, step - 1)
        self.cache.drop(victim.blocks)
        victim.blocks, victim.registered, victim.computed = [], 0, 0
        victim.epoch += 1
        self.preemptions += 1
        self._waiting.appendleft(victim)

    def _finish(self, sequence: _Sequence, now_s: float, events: list[Event]) -> None:
        del self._running[sequence.name]
        blocks = sequence.blocks
        if sequence.pin:
            self._pinned[sequence.name] = blocks
        else:
            # Full blocks of the answer are remembered like any other, though no prompt of a trace will ever ask for them.
            full = (sequence.total_tokens - 1) // self.config.block_tokens
            if full > sequence.registered and self.config.prefix_caching:
                keys = self.cache.unique_keys(full - sequence.registered)
                self.cache.register(blocks, sequence.registered, keys, sequence.last_registered)
            self.cache.drop(blocks)
        assert sequence.scheduled_s is not None
        events.append(
            Done(
                sequence.name,
                now_s,
                sequence.scheduled_s,
                sequence.first_token_s,
                sequence.cached_tokens,
                self._itl_p99_s(sequence),
            )
        )

    def _last_token_s(self, sequence: _Sequence) -> float:
        """When the last token of its last stretch came."""
        first, last, joined_s = sequence.spans[-1]
        return self._ends_s[last] if last > first else joined_s

    def _itl_p99_s(self, sequence: _Sequence) -> float | None:
        ends_s = self._ends_s
        gaps_s: list[float] = []
        before_s: float | None = None
        for first, last, joined_s in sequence.spans:
            if before_s is not None:
                gaps_s.append(joined_s - before_s)
            if last > first:
                gaps_s.append(ends_s[first + 1] - joined_s)
                stretch_s = zip(ends_s[first + 1 : last], ends_s[first + 2 : last + 1], strict=True)
                gaps_s += [after - end for end, after in stretch_s]
            before_s = ends_s[last] if last > first else joined_s
        return percentile(gaps_s, 0.99) if gaps_s else None
