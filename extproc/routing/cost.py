"""Seconds: what one choice of workers costs.

ttft(P, D) = queue(P) + load(P) + uncached(P) / rate(P) + bytes not on D / bandwidth + handshake(P, D) + queue(D)
ttft(-, D) = queue(D) + load(D) + uncached(D) / rate(D)
"""

from __future__ import annotations

import math
from collections.abc import Collection

from extproc.routing.decision import Terms
from extproc.routing.hits import Below
from extproc.routing.job import Aims, Job, Objective
from extproc.routing.load import Load
from extproc.routing.pairs import Pairs
from extproc.routing.pool import Endpoint
from extproc.routing.rates import DecodeRate, Ewma, PrefillMeter, PrefillRate, TransferRate
from extproc.routing.settings import Routing

ANSWER_TOKENS = 256
"""Length of an answer whose request does not cap it; a cap above it is rarely reached."""


TIERS = ("cpu", "disk", "lmcache")
"""Below the memory of a GPU, as :class:`Below` has them."""

_LEAST_LOAD_S = 1e-4
"""No load is faster, whatever was measured."""

Loaded = tuple[float, int, int, Endpoint]
"""How much a worker has to do, when its turn was, its place in the pool (so that no two are equal), and itself."""


class Costs:
    """What is known about the speed of workers, and the arithmetic on it."""

    def __init__(self, settings: Routing) -> None:
        self.settings = settings
        self.pairs = Pairs(settings.handshake_s)
        self.back = Pairs(settings.handshake_s)
        """The same the other way: decode workers that prefill workers read the turn before from. The giver is named first."""
        self._prefill: dict[str, tuple[PrefillRate, PrefillMeter]] = {}
        self._decode: dict[str, DecodeRate] = {}
        self._transfer: dict[str, TransferRate] = {}
        self._sources: dict[str, set[str]] = {}
        """Decode worker -> the prefill workers that it got KV from since its last report."""
        self._loads: dict[tuple[str, str], TransferRate] = {}
        """Worker and tier -> how fast it loads from there."""
        self._latest: PrefillRate | None = None
        self._guess = PrefillRate(settings.prefill_tokens_per_s)
        self._uncached_tokens = Ewma(float(settings.step_tokens) / 4)
        """Of a typical prompt: what a request of somebody else's is taken for."""

    # -- rates -------------------------------------------------------------------------------------------------------------

    def prefill_rate(self, endpoint: Endpoint) -> PrefillRate:
        """Of a worker. One that was never seen to prefill counts as fast as another one that was."""
        known = self._prefill.get(endpoint.address)
        if known is not None:
            return known[0]
        if endpoint.spec.prefill_tokens_per_s is not None:
            return self._of(endpoint)[0]
        return self._latest if self._latest is not None else self._guess

    def _of(self, endpoint: Endpoint) -> tuple[PrefillRate, PrefillMeter]:
        known = self._prefill.get(endpoint.address)
        if known is None:
            guess = endpoint.spec.prefill_tokens_per_s or self.settings.prefill_tokens_per_s
            known = self._prefill[endpoint.address] = (PrefillRate(guess), PrefillMeter())
        return known

    def decode_rate(self, endpoint: Endpoint) -> DecodeRate:
        """Of a worker."""
        rate = self._decode.get(endpoint.address)
        if rate is None:
            rate = self._decode[endpoint.address] = DecodeRate(
                self.settings.decode_step_s, self.settings.decode_seq_s, self.settings.decode_token_s
            )
        return rate

    def transfer_rate(self, endpoint: Endpoint) -> TransferRate:
        """Into a decode worker."""
        rate = self._transfer.get(endpoint.address)
        if rate is None:
            rate = self._transfer[endpoint.address] = TransferRate(self.settings.transfer_bytes_per_s)
        return rate

    def load_rate(self, address: str, tier: str) -> TransferRate:
        """From a tier, `cpu`, `disk` or `lmcache`, into the memory of a worker's GPU."""
        found = self._loads.get((address, tier))
        if found is None:
            settings = self.settings
            guess = {
                "cpu": settings.cpu_bytes_per_s,
                "disk": settings.disk_bytes_per_s,
                "lmcache": settings.lmcache_bytes_per_s,
            }
            found = self._loads[address, tier] = TransferRate(guess[tier])
        return found

    def loading(self, job: Job, address: str, cpu: int, disk: int, lmcache: int) -> Below:
        """So many tokens of a prompt in tiers of a worker, and what loading them takes."""
        size = self.kv_bytes_per_token(job)
        load_s = sum(
            self.load_rate(address, tier).seconds(tokens * size)
            for tier, tokens in (("cpu", cpu), ("disk", disk), ("lmcache", lmcache))
            if tokens
        )
        return Below(cpu, disk, lmcache, load_s)

    def loaded(
        self, endpoint: Endpoint, job: Job, below: Below, *, sent_s: float, now_s: float, uncached: float, cached: float
    ) -> None:
        """A prefill worker replied that had to load first: what it took beyond computing was that. It says nothing new of how
        fast it computes."""
        rate, meter = self._of(endpoint)
        took_s = meter.passed(rate, sent_s=sent_s, now_s=now_s)
        tiers = [(tier, tokens) for tier, tokens in zip(TIERS, below[:3], strict=True) if tokens]
        load_s = max(took_s - rate.seconds(uncached, cached), _LEAST_LOAD_S)
        # Of several nobody can tell which was how slow, nor how long the first meeting of two took.
        if below.decode:
            giver, size_bytes = job.next_turn, below.decode * self.kv_bytes_per_token(job)
            if giver is not None and not tiers and self.back.met(giver.decode, endpoint.address):
                guess = TransferRate(self.settings.transfer_bytes_per_s)
                self.back.transferred(giver.decode, endpoint.address, size_bytes, load_s, guess)
        elif len(tiers) == 1:
            ((tier, tokens),) = tiers
            self.load_rate(endpoint.address, tier).note(tokens * self.kv_bytes_per_token(job), load_s)

    def prefilled(self, endpoint: Endpoint, *, sent_s: float, now_s: float, uncached: float, cached: float) -> None:
        """A prefill worker replied."""
        rate, meter = self._of(endpoint)
        meter.reply(rate, sent_s=sent_s, now_s=now_s, uncached=uncached, cached=cached)
        self._latest = rate
        self._uncached_tokens.note(uncached)

    def handed_over(self, prefill: str, decode: str) -> None:
        """KV goes from one to the other: what the decode worker reports next is about them, if it is about nobody else."""
        self.pairs.succeeded(prefill, decode)
        self._sources.setdefault(decode, set()).add(prefill)

    def reported(self, endpoint: Endpoint, load: Load) -> None:
        """A worker reported."""
        if load.itl_s is not None and load.itl_s > 0:
            known = load.kv_usage is not None and endpoint.kv_tokens is not None
            kv_tokens = (load.kv_usage or 0.0) * (endpoint.kv_tokens or 0) if known else endpoint.decode.tokens
            self.decode_rate(endpoint).note(load.running or 1.0, load.itl_s, kv_tokens)
        sources = self._sources.pop(endpoint.address, None)
        if load.transfer_s is not None and load.transfer_bytes is not None:
            rate = self.transfer_rate(endpoint)
            rate.note(load.transfer_bytes, load.transfer_s)
            if sources is not None and len(sources) == 1:
                (prefill,) = sources
                self.pairs.transferred(prefill, endpoint.address, load.transfer_bytes, load.transfer_s, rate)

    def forget(self, addresses: Collection[str]) -> None:
        """The workers are gone."""
        for known in (self._prefill, self._decode, self._transfer, self._sources):
            for address in addresses:
                known.pop(address, None)
        for place in [place for place in self._loads if place[0] in addresses]:
            del self._loads[place]
        self.pairs.forget_all(addresses)
        self.back.forget_all(addresses)

    # -- states of workers -------------------------------------------------------------------------------------------------

    def external(self, endpoint: Endpoint, now_s: float, *, prefill: bool) -> float:
        """Requests on the worker that are not ours, as far as its last report is believed."""
        leg = endpoint.prefill if prefill else endpoint.decode
        return leg.external_requests if now_s - leg.external_s <= self.settings.stale_s else 0.0

    def backlog_s(self, endpoint: Endpoint, now_s: float) -> float:
        """Until the prefill worker is through with what it has."""
        own_s = endpoint.prefill.busy_until_s - now_s
        if own_s < 0.0:
            # What is overdue is expected to take as long again: who waits for a worker that hangs would wait for ever.
            own_s = -own_s if endpoint.prefill.claims else 0.0
        if not endpoint.prefill.external_requests:
            return own_s
        return own_s + self._others_left(endpoint, now_s) * self.typical_prefill_s(endpoint)

    def typical_prefill_s(self, endpoint: Endpoint) -> float:
        """What a prompt of which nothing is known takes there."""
        return self.prefill_rate(endpoint).seconds(self._uncached_tokens.value)

    def outstanding_tokens(self, endpoint: Endpoint, now_s: float) -> float:
        """Prompt tokens that the prefill worker has yet to compute, ours and others'."""
        if not endpoint.prefill.external_requests:
            return endpoint.prefill.tokens
        return endpoint.prefill.tokens + self._others_left(endpoint, now_s) * self._uncached_tokens.value

    def _others_left(self, endpoint: Endpoint, now_s: float) -> float:
        """Requests of others that the prefill worker still has: it has been at them since it reported them."""
        others = self.external(endpoint, now_s, prefill=True)
        each_s = self.typical_prefill_s(endpoint)
        return max(0.0, others - (now_s - endpoint.prefill.external_s) / each_s)

    def room_tokens(self, endpoint: Endpoint) -> int:
        """Of one scheduler step."""
        return endpoint.step_tokens or self.settings.step_tokens

    def sequences(self, endpoint: Endpoint, now_s: float) -> float:
        """On the decode worker, ours and others'."""
        leg = endpoint.decode
        if not leg.external_requests:
            return len(leg.claims)
        return len(leg.claims) + self.external(endpoint, now_s, prefill=False)

    def full(self, endpoint: Endpoint, tokens: int, now_s: float) -> bool:
        """Whether the decode worker has no room for a sequence of ``tokens`` beside those that it runs."""
        sequences = self.sequences(endpoint, now_s)
        if sequences < 1:
            return False  # what does not fit into an empty worker is the engine's to refuse
        if sequences >= (endpoint.max_seqs or self.settings.worker_max_seqs):
            return True
        size = endpoint.kv_tokens or self.settings.worker_kv_tokens
        return self.held_tokens(endpoint, now_s) + tokens > self.settings.kv_headroom * size

    def held_tokens(self, endpoint: Endpoint, now_s: float) -> int:
        """KV tokens taken on the decode worker: by ours, and by others as far as its last report is believed."""
        leg = endpoint.decode
        fresh = leg.external_tokens and now_s - leg.external_s <= self.settings.stale_s
        return leg.tokens + leg.external_tokens if fresh else leg.tokens

    # -- the same of many: plain arithmetic without calls, because a thousand workers are looked at for every prompt --------

    def with_backlog(self, endpoints: list[Endpoint], now_s: float) -> list[Loaded]:
        """Prefill workers, each with its :meth:`backlog_s`."""
        found: list[Loaded] = []
        for position, endpoint in enumerate(endpoints):
            leg = endpoint.prefill
            if leg.external_requests:
                backlog_s = self.backlog_s(endpoint, now_s)
            elif leg.claims:
                backlog_s = abs(leg.busy_until_s - now_s)
            else:
                backlog_s = 0.0
            found.append((backlog_s, leg.turn, position, endpoint))
        return found

    def idlest_prefill(self, endpoints: list[Endpoint], now_s: float) -> tuple[Endpoint, float]:
        """The prefill worker with the least to do, and its :meth:`backlog_s`."""
        idle: Endpoint | None = None
        turn: float = math.inf
        for endpoint in endpoints:
            leg = endpoint.prefill
            if leg.claims or leg.turn >= turn:
                continue
            if not leg.external_requests or self.backlog_s(endpoint, now_s) <= 0:
                idle, turn = endpoint, leg.turn
        if idle is not None:
            return idle, 0.0
        backlog_s, _, _, endpoint = min(self.with_backlog(endpoints, now_s))
        return endpoint, backlog_s

    def with_room(self, endpoints: list[Endpoint], tokens: int | None, now_s: float) -> list[Loaded]:
        """Decode workers that are not :meth:`full` for ``tokens`` more, each with its :meth:`sequences`; None: all of them."""
        settings = self.settings
        fresh_s = now_s - settings.stale_s
        found: list[Loaded] = []
        for position, endpoint in enumerate(endpoints):
            leg = endpoint.decode
            sequences: float = len(leg.claims)
            if leg.external_requests and leg.external_s >= fresh_s:
                sequences += leg.external_requests
            if tokens is not None and sequences >= 1:
                if sequences >= (endpoint.max_seqs or settings.worker_max_seqs):
                    continue
                held = leg.tokens + leg.external_tokens if leg.external_s >= fresh_s else leg.tokens
                if held + tokens > settings.kv_headroom * (endpoint.kv_tokens or settings.worker_kv_tokens):
                    continue
            found.append((sequences, leg.turn, position, endpoint))
        return found

    # -- choices -----------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, job: Job) -> float:
        """Of the job's model."""
        settings = self.settings
        if not settings.kv_bytes_by_model or job.model is None:
            return settings.kv_bytes_per_token
        return settings.kv_bytes_by_model.get(job.model, settings.kv_bytes_per_token)

    def answer_tokens(self, job: Job) -> int:
        """Tokens that the answer is expected to have."""
        return min(job.answer_tokens, ANSWER_TOKENS * 4) if job.answer_tokens is not None else ANSWER_TOKENS

    def apart(
        self,
        job: Job,
        prefill: Endpoint,
        decode: Endpoint,
        cached_prefill: int,
        cached_decode: int,
        now_s: float,
        load_s: float = 0.0,
    ) -> Terms:
        """A handoff. ``cached_*`` are prompt tokens that the two hold, the decode worker in its GPU's memory; ``load_s``: what
        the prefill worker loads first."""
        terms = self.between(
            job,
            prefill,
            decode,
            self.prefilling(job, prefill, cached_prefill, now_s),
            self.decoding(job, decode, now_s),
            cached_decode,
            now_s,
        )
        terms.load_s = load_s
        return terms

    def prefilling(self, job: Job, prefill: Endpoint, cached: int, now_s: float) -> tuple[float, float]:
        """What only the prefill worker decides: seconds until it begins, and until it is through."""
        uncached = max(job.tokens - cached, 1)
        return self.backlog_s(prefill, now_s), self.prefill_rate(prefill).seconds(uncached, cached)

    def between(
        self,
        job: Job,
        prefill: Endpoint,
        decode: Endpoint,
        prefilling: tuple[float, float],
        decoding: tuple[float, float],
        cached_decode: int,
        now_s: float,
    ) -> Terms:
        """A handoff, from what :meth:`prefilling` and :meth:`decoding` say of the two workers, and what the pair adds."""
        missing_bytes = max(job.tokens - cached_decode, 0) * self.kv_bytes_per_token(job)
        rate, handshake_s, penalty_s = self.pairs.between(prefill.address, decode.address, now_s)
        return Terms(
            queue_prefill_s=prefilling[0],
            prefill_s=prefilling[1],
            transfer_s=(rate or self.transfer_rate(decode)).seconds(missing_bytes),
            handshake_s=handshake_s,
            overhead_s=self.settings.handoff_overhead_s,
            penalty_s=penalty_s,
            queue_decode_s=decoding[0],
            generation_s=decoding[1],
        )

    def whole(self, job: Job, decode: Endpoint, cached: int, now_s: float, load_s: float = 0.0) -> Terms:
        """The decode worker does it all, and its streams wait meanwhile, but not while it loads for ``load_s``."""
        queue_s, generation_s = self.decoding(job, decode, now_s)
        terms = Terms(queue_decode_s=queue_s, generation_s=generation_s, load_s=load_s)
        terms.queue_prefill_s = self.backlog_s(decode, now_s)
        terms.prefill_s = self.prefill_rate(decode).seconds(max(job.tokens - cached, 1), cached)
        terms.stall_s = terms.prefill_s * self.sequences(decode, now_s)
        return terms

    def longest_stall_s(self, job: Job, decode: Endpoint, cached: int, now_s: float) -> float:
        """The longest gap between two tokens that a prefill on the decode worker causes in the streams there."""
        uncached = max(job.tokens - cached, 1)
        chunk = min(uncached, self.room_tokens(decode))
        chunk_s = self.prefill_rate(decode).seconds(chunk, job.tokens - chunk)
        return chunk_s + self.decode_rate(decode).itl_s(self.sequences(decode, now_s), decode.decode.tokens)

    def decoding(self, job: Job, decode: Endpoint, now_s: float) -> tuple[float, float]:
        """What only the decode worker decides: seconds until it has room, and that the answer takes longer than alone."""
        rate = self.decode_rate(decode)
        sequences = self.sequences(decode, now_s)
        answer, tokens = self.answer_tokens(job), decode.decode.tokens
        over = sequences + 1 - (decode.max_seqs or self.settings.worker_max_seqs)
        queue_s = over * rate.itl_s(sequences, tokens) * answer / max(sequences, 1) if over > 0 else 0.0
        return queue_s, answer * rate.longer_s(sequences, tokens, job.tokens)

    def total(self, aims: Aims, terms: Terms, *, pressure: float) -> float:
        """What the objective makes of the terms. ``pressure``: how busy the prefill pool is, 0 to 1."""
        objective = aims.objective
        if objective is Objective.TTFT:
            return terms.ttft_s
        if objective is Objective.THROUGHPUT:
            return terms.prefill_s + terms.transfer_s + terms.stall_s + terms.generation_s + 0.01 * terms.ttft_s
        hold_s = terms.hold_s = self.settings.hold * pressure * terms.prefill_s
        return terms.ttft_s + hold_s + terms.stall_s + terms.generation_s
