"""The engine core: which sequences run in the next step, and what the step brings. vLLM's scheduler in small.

Running sequences first, then waiting ones in order, within ``max_num_seqs`` and a token budget a step (chunked prefill). A step
is planned, takes its time elsewhere, and is committed. No I/O here; time is given. What must happen outside (pull KV, tell a
prefill worker to let go) is left in ``effects``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.sim import hashing
from workers.sim.blocks import BlockPool, Kv, Stored
from workers.sim.handoff import Handoffs
from workers.sim.host_cache import HostCache
from workers.sim.request import Sequence, Status
from workers.sim.text import MEAN_ANSWER_TOKENS, Answer


@dataclass(frozen=True)
class CoreConfig:
    """The limits of one engine."""

    block_size: int = 16
    num_blocks: int = 34_900
    max_model_len: int = 32_768
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    host_blocks: int = 0
    """KV blocks that the host's memory keeps behind the GPU's cache."""
    hash_seed: str = hashing.DEFAULT_SEED
    lease_s: float = 30.0
    recompute_on_load_failure: bool = False
    bidirectional: bool = False
    """Keep the blocks of an answer to a handoff for the next turn's prefill, and read those of others for one."""
    turn_ttl_s: float = 480.0
    """How long such blocks are kept."""
    recompute_threshold_tokens: int = 64
    """A prefill reads nothing where it would save fewer."""
    mean_answer_tokens: int = MEAN_ANSWER_TOKENS
    decode_burst_tokens: int = 1
    """Tokens a running sequence gets in one step; more than one only where no time is simulated."""


@dataclass(frozen=True)
class Identity:
    """Where a decode worker finds this engine."""

    engine_id: str
    host: str
    port: int


class Pull(NamedTuple):
    """Fetch these remote blocks for a sequence, then call pulled()."""

    sequence: Sequence
    remote_blocks: list[int]
    tokens: int
    until: int
    """They are the tokens of the prompt before this one."""
    turn: bool = False
    """They are those of an answer: the prompt must begin with exactly what they hold."""


class Release(NamedTuple):
    """Tell the worker of these kv_transfer_params that nobody will read its blocks."""

    request_id: str
    params: dict[str, Any]


class Load(NamedTuple):
    """Copy these blocks from the host's memory for a sequence, then call loaded()."""

    sequence: Sequence
    kv: list[Kv]


class Stuck(NamedTuple):
    """A prefill was given blocks to read on an engine that cannot: it waits for them for ever, as vLLM 0.32 does."""

    request_id: str


Effect = Pull | Load | Release | Stuck


class Work(NamedTuple):
    """One sequence's part of a step."""

    sequence: Sequence
    tokens: int


@dataclass
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0


@dataclass
class Counters:
    """What the metrics endpoint shows, since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    local_compute_tokens: int = 0
    local_hit_tokens: int = 0
    pulled_tokens: int = 0
    host_tokens: int = 0
    """Loaded from the host's memory."""
    generated_tokens: int = 0
    preemptions: int = 0
    expired: int = 0
    late_notifications: int = 0
    steps: int = 0
    busy_steps_prefill: int = 0


class Core:
    """One engine."""

    def __init__(
        self,
        config: CoreConfig,
        pool: BlockPool,
        handoffs: Handoffs,
        identity: Identity,
        *,
        host: HostCache | None = None,
        on_leak: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.host = host
        self.handoffs = handoffs
        self.identity = identity
        self._on_leak = on_leak
        self._root = hashing.root_hash(config.hash_seed)
        self.waiting: deque[Sequence] = deque()
        self.pulling: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.effects: list[Effect] = []
        self.counters = Counters()

    # -- from outside ------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Queue it."""
        sequence.arrived_s = now_s
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """The client is gone. A handoff that was not read yet is given back; a pull under way runs to its end."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            if sequence.wants_pull:
                self.reject(sequence.request_id, sequence.kv_params or {})
        elif sequence.status is Status.PULLING:
            # The blocks stay taken until pulled(): a transfer writes into them.
            sequence.status = Status.FINISHED
            sequence.on_end("abort")
            return
        else:
            self.running.remove(sequence)
        self._finish(sequence, "abort")

    def reject(self, request_id: str, params: dict[str, Any]) -> None:
        """A request with these params will not run: its prefill worker may let go."""
        self.effects.append(Release(request_id, params))

    def pulled(self, sequence: Sequence, kv: Seq[Kv] | None) -> None:
        """The pull of a sequence ended: with what the remote blocks held, or with None if it failed."""
        self.pulling.pop(sequence.request_id, None)
        if sequence.status is Status.FINISHED:
            self.pool.drop(sequence.blocks)
            sequence.blocks = []
            return
        size, prompt = self.config.block_size, len(sequence.prompt)
        hit = sequence.cached_tokens or 0
        sequence.pull_allowed = False
        until = sequence.pull_until
        if kv is None and not self.config.recompute_on_load_failure:
            self._finish(sequence, "error")
            return
        if kv is None:
            sequence.computed = hit
        else:
            for block, held in zip(sequence.blocks[hit // size :], kv, strict=False):
                self.pool.kv[block] = held
            sequence.pulled_tokens = until - hit
            sequence.computed = until
            self._register(sequence)
            # The last token is computed here in any case: sampling needs its logits.
            sequence.computed = min(until, prompt - 1)
            self.counters.external_hits += until - hit
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def loaded(self, sequence: Sequence, kv: Seq[Kv]) -> None:
        """What a sequence was to get from the host's memory is there."""
        del self.pulling[sequence.request_id]
        if sequence.status is Status.FINISHED:
            self.pool.drop(sequence.blocks)
            sequence.blocks = []
            return
        size = self.config.block_size
        for block, held in zip(sequence.blocks[sequence.computed // size :], kv, strict=False):
            self.pool.kv[block] = held
        sequence.computed += len(kv) * size
        self.counters.external_hits += len(kv) * size
        self._register(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def expire(self, now_s: float) -> None:
        """Free handoffs that nobody fetched in time."""
        for pinned in self.handoffs.expire(now_s):
            self.counters.expired += 1
            kind = "reply_lost" if pinned.reply_lost else "peer_lost" if pinned.wanted else "leaked_blocks"
            if pinned.turn:
                kind = "turn_unused"
            if self._on_leak is not None:
                self._on_leak(kind, pinned.request_id, f"{len(pinned.blocks)} blocks, freed by the end of the lease")

    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return bool(self.running or self.waiting)

    # -- a step ------------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> Plan:
        """The next step: who runs, with how many tokens."""
        plan = Plan()
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(self._wanted(sequence), budget)
            if not self._grow(sequence, sequence.computed + tokens):
                continue  # somebody was preempted, perhaps this one
            self._put(plan, sequence, tokens)
            budget -= tokens
            index += 1
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            ready = self._next_waiting(now_s)
            if ready is None:
                break
            sequence = ready
            self.waiting.remove(sequence)
            if sequence.status is Status.PULLING:
                continue
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            # One that was preempted may miss a single token: it has blocks for that, and for no burst.
            tokens = min(len(sequence.token_ids) - sequence.computed, budget)
            self._put(plan, sequence, tokens)
            budget -= tokens
        return plan

    def commit(self, plan: Plan, now_s: float) -> None:
        """The step is done: KV is written, tokens come out, sequences end."""
        self.counters.steps += 1
        for sequence, tokens in plan.work:
            if sequence.status is not Status.RUNNING:
                continue
            start, target = sequence.computed, len(sequence.token_ids)
            if start + tokens < target:  # a chunk of a prefill
                self._write(sequence, start, start + tokens)
                continue
            self._write(sequence, start, target)
            self._sample(sequence, start + tokens - target + 1, now_s)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _wanted(self, sequence: Sequence) -> int:
        left = len(sequence.token_ids) - sequence.computed
        if left == 1 and sequence.answered:
            room = sequence.stop.max_tokens - sequence.answered
            return max(1, min(self.config.decode_burst_tokens, room))
        return left

    def _put(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        plan.work.append(Work(sequence, tokens))
        context = sequence.computed + tokens
        if sequence.answered and len(sequence.token_ids) - sequence.computed == 1:
            plan.decodes += 1
            plan.decode_context_tokens += context
        else:
            plan.prefill_tokens += tokens
            plan.prefill_context_tokens += tokens * (sequence.computed + context) // 2

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens; False after making room by preempting the last running sequence."""
        missing = -(-tokens // self.config.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.take(missing)
        if fresh is not None:
            sequence.blocks += fresh
            return True
        victim = self.running.pop()
        self.pool.drop(victim.blocks)
        victim.blocks, victim.registered, victim.computed = [], 0, 0
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(victim)
        return False

    def _next_waiting(self, now_s: float) -> Sequence | None:
        """The first in the queue; if there are no blocks for it, the first that has its blocks already (its pull is over).

        Without the second rule a sequence that waits for blocks could wait for one behind it, and that one for it.
        """
        if self._admit(self.waiting[0], now_s):
            return self.waiting[0]
        return next((sequence for sequence in self.waiting if sequence.blocks), None)

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        """Give a waiting sequence its blocks; False if there are not enough."""
        if sequence.blocks:  # came back from a pull
            return True
        size, total = self.config.block_size, len(sequence.token_ids)
        hit: list[int] = []
        use_cache = self.config.prefix_caching and sequence.prompt_logprobs is None
        if use_cache:
            self._hash_up_to(sequence, total // size)
            hit = self.pool.match(sequence.hashes[: (total - 1) // size])
        self.pool.hold(hit)
        fresh = self.pool.take(-(-total // size) - len(hit))
        if fresh is None:
            self.pool.drop(hit)
            return False
        sequence.blocks = hit + fresh
        sequence.registered = len(hit)
        sequence.computed = len(hit) * size
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
            sequence.cached_tokens = sequence.computed
            if use_cache:
                self.counters.prefix_queries += total
                self.counters.prefix_hits += sequence.computed
        if sequence.wants_pull and sequence.prompt_logprobs is not None:
            # The whole prompt is computed here, and the prefill worker is told to let go.
            sequence.pull_allowed = False
            self.reject(sequence.request_id, sequence.kv_params or {})
        elif sequence.wants_pull:
            self._pull(sequence, fresh)
        elif sequence.wants_turn:
            self._pull_turn(sequence)
        elif self.host is not None and use_cache:
            self._load(sequence, self.host)
        return True

    def _load(self, sequence: Sequence, host: HostCache) -> None:
        """What the host's memory has behind the cached blocks; the last token is computed in any case."""
        size = self.config.block_size
        cached = sequence.computed // size
        usable = sequence.hashes[: (len(sequence.token_ids) - 1) // size]
        wanted = usable[cached : cached + host.match(usable[cached:])]
        host.touch(usable[: cached + len(wanted)])
        self.counters.external_queries += len(sequence.token_ids) - sequence.computed
        if not wanted:
            return
        if not sequence.host_tokens and not sequence.preemptions:
            sequence.host_tokens = len(wanted) * size
        sequence.status = Status.PULLING
        self.pulling[sequence.request_id] = sequence
        self.effects.append(Load(sequence, host.read(wanted)))

    def _pull(self, sequence: Sequence, fresh: list[int]) -> None:
        params = sequence.kv_params or {}
        groups = params.get("remote_block_ids")
        # One list a KV cache group, of which there is one here; a flat list before there were groups.
        flat = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], list) else groups
        remote = list(flat) if isinstance(flat, list) else []
        tokens = len(sequence.prompt) - sequence.computed
        self.counters.external_queries += tokens
        sequence.status = Status.PULLING
        self.pulling[sequence.request_id] = sequence
        sequence.pull_until = len(sequence.prompt)
        # As vLLM does where the local prefix cache has the start: the last ones are taken.
        self.effects.append(Pull(sequence, remote[-len(fresh) :], tokens, sequence.pull_until))

    def _pull_turn(self, sequence: Sequence) -> None:
        """A prefill whose beginning is in a decode worker's blocks, as its params say. What they hold is not compared."""
        params = sequence.kv_params or {}
        sequence.pull_allowed = False
        until = min(int(params.get("remote_num_tokens") or 0), len(sequence.prompt))
        tokens = until - sequence.computed
        worth = tokens > 0 and tokens >= self.config.recompute_threshold_tokens
        if not self.config.bidirectional:
            if worth:
                sequence.status = Status.PULLING
                self.pulling[sequence.request_id] = sequence
                self.effects.append(Stuck(sequence.request_id))
            return
        if not worth:
            self.reject(sequence.request_id, params)
            return
        size = self.config.block_size
        wanted = -(-until // size) - sequence.computed // size
        self.counters.external_queries += tokens
        sequence.pull_until = until
        sequence.status = Status.PULLING
        self.pulling[sequence.request_id] = sequence
        # Again the last ones: blocks behind the tokens, if any are named, are read in the place of others.
        self.effects.append(Pull(sequence, list(params["remote_block_ids"][0])[-wanted:], tokens, until, turn=True))

    def _hash_up_to(self, sequence: Sequence, blocks: int) -> None:
        size = self.config.block_size
        for index in range(len(sequence.hashes), blocks):
            parent = sequence.hashes[-1] if sequence.hashes else self._root
            sequence.hashes.append(
                hashing.block_hash(parent, sequence.token_ids[index * size : (index + 1) * size], self._extra(sequence, index))
            )

    def _extra(self, sequence: Sequence, index: int) -> hashing.ExtraKeys:
        return hashing.extra_keys(
            index, adapter=sequence.adapter, adapter_path=sequence.adapter_path, cache_salt=sequence.cache_salt
        )

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        """The KV of tokens ``start`` to ``end`` goes into the blocks; what a block held before ``start`` stays."""
        size = self.config.block_size
        for index in range(start // size, -(-end // size)):
            first, last = max(start, index * size), min(end, (index + 1) * size)
            block = sequence.blocks[index]
            if first == index * size:
                held = Kv(sequence.context(index, size), sequence.bytes_of(first, last))
            else:
                old = self.pool.kv[block]
                held = Kv(old.context, old.tokens[: (first - index * size) * 4] + sequence.bytes_of(first, last))
            self.pool.kv[block] = held
        sequence.computed = end
        self._register(sequence)

    def _register(self, sequence: Sequence) -> None:
        size = self.config.block_size
        full = sequence.computed // size
        if full <= sequence.registered or not self.config.prefix_caching:
            return
        self._hash_up_to(sequence, full)
        first = sequence.registered
        published = [
            None if keys is None else tuple(key[1] for key in keys)
            for keys in (self._extra(sequence, index) for index in range(first, full))
        ]
        stored = Stored(
            hashes=tuple(sequence.hashes[first:full]),
            parent=sequence.hashes[first - 1] if first else None,
            token_ids=tuple(sequence.token_ids[first * size : full * size]),
            adapter=sequence.adapter,
            extra_keys=tuple(published),
        )
        self.pool.register(sequence.blocks[first:full], stored)
        if self.host is not None:
            self.host.store(stored, [self.pool.kv[block] for block in sequence.blocks[first:full]])
        sequence.registered = full

    def _sample(self, sequence: Sequence, count: int, now_s: float) -> None:
        """Up to ``count`` tokens. The first sees what the blocks hold."""
        if sequence.answer is None:
            state = self.pool.state(sequence.blocks, len(sequence.prompt), sequence.adapter)
            mean = self.config.mean_answer_tokens
            sequence.answer = Answer(state, sequence.stop, mean_tokens=mean, eos_first=sequence.eos_first)
            sequence.first_token_s = now_s
            found = (sequence.cached_tokens or 0) + sequence.host_tokens
            sequence.local_tokens = len(sequence.prompt) - found - sequence.pulled_tokens
            self.counters.local_compute_tokens += sequence.local_tokens
            self.counters.local_hit_tokens += sequence.cached_tokens or 0
            self.counters.pulled_tokens += sequence.pulled_tokens
            self.counters.host_tokens += sequence.host_tokens
        steps = []
        for _ in range(count):
            steps.append(sequence.answer.next())
            sequence.token_ids.append(steps[-1].token_id)
            if steps[-1].finish_reason is not None:
                break
        if len(steps) > 1:  # all but the last were input already, and have KV
            self._write(sequence, sequence.computed, len(sequence.token_ids) - 1)
        self.counters.generated_tokens += len(steps)
        sequence.last_token_s = now_s
        reason = steps[-1].finish_reason
        if reason is not None:
            self.running.remove(sequence)
            self._finish(sequence, reason, now_s)
        sequence.on_steps(steps)
        if reason is not None:
            sequence.on_end(reason)

    def _finish(self, sequence: Sequence, reason: str, now_s: float = 0.0) -> None:
        """The one way out: blocks are pinned for a decode worker, or freed."""
        sequence.status = Status.FINISHED
        blocks, sequence.blocks = sequence.blocks, []
        if reason in ("stop", "length"):
            if sequence.is_prefill_leg and not sequence.null_params:
                used = blocks[: -(-sequence.computed // self.config.block_size)]
                self.pool.drop(blocks[len(used) :])
                self.handoffs.pin(sequence.request_id, used, now_s)
                sequence.kv_result = self._params(sequence, used)
                return
            if self.config.bidirectional and sequence.kv_params and not sequence.is_prefill_leg:
                # vLLM names all that is allocated: blocks for tokens that were guessed are among them. There are none here.
                self.handoffs.pin_turn(sequence.request_id, blocks, now_s, self.config.turn_ttl_s)
                sequence.kv_result = {
                    **self._params(sequence, blocks),
                    "do_remote_prefill": False,
                    "do_remote_decode": True,
                    "remote_blocks_expiry_time": now_s + self.config.turn_ttl_s,
                }
                del sequence.kv_result["remote_prefill_cached_tokens"]
                return
        else:
            sequence.on_end(reason)
        self.pool.drop(blocks)

    def _params(self, sequence: Sequence, blocks: list[int]) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.identity.engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self.identity.host,
            "remote_port": self.identity.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": (sequence.cached_tokens or 0) + sequence.host_tokens + sequence.pulled_tokens,
        }
