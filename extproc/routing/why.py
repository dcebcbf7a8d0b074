"""Why a choice of workers lost, in words: which term decided, or which rule."""

from __future__ import annotations

from extproc.routing import health
from extproc.routing.decision import Candidate, Decision
from extproc.routing.hits import Hits
from extproc.routing.job import Job, Mode, Objective
from extproc.routing.partition import POOL_LABEL
from extproc.routing.picker import WEIGHED, FullError, NoEndpointError
from extproc.routing.pool import Endpoint, Role
from extproc.routing.router import Router
from extproc.routing.scales import HOLD

_SAME_S = 1e-6
"""Costs nearer to each other than this are the same."""

_PRUNED = "not weighed: others have less to do or hold more of the prompt"
_TURN = "costs the same; it was another's turn"

_WHOLE_REASONS = {
    "cannot_hand_over": "the request cannot be handed over",
    "policy": "the policy never hands over",
    "late": "its SLO is out of reach, and the policy then lets a decode worker do it all",
    "spare": "it is late, and a decode worker has nothing to do",
}


def time_words(seconds: float) -> str:
    """``1.9 s``, ``210 ms``, ``0.3 ms``."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f} ms"


def who_is_out(router: Router, job: Job) -> list[tuple[str, Role, str]]:
    """The workers that cannot get ``job`` now: address, role, why. The clock of ``router`` stands at 0."""
    out = []
    for role, labels in ((Role.PREFILL, job.aims.prefill_labels), (Role.DECODE, job.aims.decode_labels)):
        good = []
        blocked = []
        for endpoint in router.pool.endpoints:
            if role not in endpoint.roles:
                continue
            if endpoint.leaving:
                why = "leaving: it is no longer among the configured workers"
            elif not endpoint.live:
                why = "not live"
            elif labels.get(POOL_LABEL) != endpoint.labels.get(POOL_LABEL):
                why = f"in the pool {endpoint.labels.get(POOL_LABEL)}"
            elif not endpoint.serves(job.model):
                why = f"does not serve the model {job.model!r}"
            elif missing := [f"{key}={value}" for key, value in labels.items() if endpoint.labels.get(key) != value]:
                why = f"label {', '.join(missing)} missing"
            elif not health.usable(endpoint.leg(role), 0.0):
                blocked.append(endpoint)
                continue
            else:
                good.append(endpoint)
                continue
            out.append((endpoint.address, role, why))
        if good:  # else all have failed, and all are tried
            out += [(each.address, role, _breaker(each, role)) for each in blocked]
        if role is Role.DECODE:
            out += _full(router, job, good or blocked)
    return out


def _breaker(endpoint: Endpoint, role: Role) -> str:
    leg = endpoint.leg(role)
    return f"breaker open for {time_words(leg.blocked_until_s)} after {leg.failures} failures"


def _full(router: Router, job: Job, decodes: list[Endpoint]) -> list[tuple[str, Role, str]]:
    costs, need = router.costs, job.tokens + router.costs.answer_tokens(job)
    full = [each for each in decodes if costs.full(each, need, 0.0)]
    if len(full) == len(decodes) and not _held(router, job):
        return []  # it is sent all the same, and waits in the engine
    out = []
    for each in full:
        most = each.max_seqs or router.settings.worker_max_seqs
        sequences = costs.sequences(each, 0.0)
        taken = costs.held_tokens(each, 0.0)
        what = f"{sequences:.0f} of {most} sequences" if sequences >= most else f"{taken:,} KV tokens are taken"
        out.append((each.address, Role.DECODE, f"full: {what}"))
    return out


def _held(router: Router, job: Job) -> bool:
    return job.aims.held and router.settings.dispatch == "queue" and job.aims.objective in WEIGHED


class Why:
    """Compares choices with the best one."""

    def __init__(
        self, router: Router, job: Job, hits: Hits, best: Candidate, decision: Decision | None, ahead_s: float
    ) -> None:
        """``decision``: what was decided, if anything; ``best`` is then its choice. ``ahead_s``: expected wait in our queue."""
        self._router = router
        self._job = job
        self._hits = hits
        self._best = best
        self._reason = decision.reason if decision is not None else ""
        self._held = _held(router, job)
        self._ahead_s = ahead_s if self._held and router.scales.rivals(job) else 0.0
        self._home = router.picker._sessions.get(job.session) if job.session else None
        self._decodes, self._prefills = self._weighed()

    def lost(self, other: Candidate) -> str:
        """Why ``other`` is not the best one."""
        best, aims = self._best, self._job.aims
        if best.prefill is None and other.prefill is not None:
            return self._not_apart(other)
        if best.prefill is not None and other.prefill is None:
            if aims.mode is Mode.DISAGGREGATE:
                return "the policy always hands over"
            if other.refused is not None:
                return other.refused
            if aims.threshold_uncached_tokens is not None:
                return f"{aims.threshold_uncached_tokens:,} tokens or more are not cached: handed over"
            return self._decode_rule(other) or self._terms(other)
        if other.prefill != best.prefill and (rule := self._prefill_rule(other)):
            return rule
        if other.decode != best.decode and (rule := self._decode_rule(other)):
            return rule
        if best.prefill is None and other.refused is not None:
            return other.refused
        return self._terms(other)

    def _not_apart(self, other: Candidate) -> str:
        if self._reason in _WHOLE_REASONS:
            return _WHOLE_REASONS[self._reason]
        job = self._job
        if not job.handoff:
            return _WHOLE_REASONS["cannot_hand_over"]
        if job.aims.mode is Mode.AGGREGATE:
            return _WHOLE_REASONS["policy"]
        threshold = job.aims.threshold_uncached_tokens
        if threshold is not None:
            return f"fewer than {threshold:,} tokens are not cached: not handed over"
        return self._terms(other, queue_s=self._ahead_s)

    def _weighed(self) -> tuple[set[str], set[str]]:
        """Addresses that the picker looks at, of decode and of prefill workers."""
        router, job, hits = self._router, self._job, self._hits
        decodes: list[Endpoint] = []
        prefills: list[Endpoint] = []
        if job.aims.objective is not Objective.RANDOM:
            try:
                decodes = router.picker.decodes(job, hits, 0.0, admit=self._held, crowded=router.scales.crowded(job))
                prefills = router.picker.prefills(job, hits, 0.0)
            except (NoEndpointError, FullError):
                pass
        return {each.address for each in decodes}, {each.address for each in prefills}

    # -- rules -------------------------------------------------------------------------------------------------------------

    def _prefill_rule(self, other: Candidate) -> str | None:
        """Why the prefill worker of ``other`` was not taken, where that was not settled by the cost."""
        if self._held:
            return self._in_the_queue(other)
        objective, hits = self._job.aims.objective, self._hits
        mine, best = self._endpoint(other.prefill), self._endpoint(self._best.prefill)
        if objective is Objective.RANDOM:
            return "not drawn"
        if objective is Objective.ROUND_ROBIN:
            return "it was another's turn"
        if objective is Objective.LEAST_LOAD:
            costs = self._router.costs
            more = costs.outstanding_tokens(mine, 0.0) - costs.outstanding_tokens(best, 0.0)
            return f"has {more:,.0f} tokens more to compute" if more > 0 else "it was another's turn"
        if objective is Objective.PREFIX:
            less = hits.of(best) - hits.of(mine)
            return f"holds {less:,} tokens less of the prompt" if less > 0 else "it was another's turn"
        return None

    def _in_the_queue(self, other: Candidate) -> str:
        """The queue settles the prefill worker first: by its backlog, and by its work, which counts more than once."""
        mine, best = other.terms, self._best.terms
        longer_s = mine.queue_prefill_s - best.queue_prefill_s
        loads_s = mine.load_s - best.load_s
        hold = self._router.settings.hold * HOLD[self._job.aims.objective]
        work_s = (1 + hold) * (mine.prefill_s - best.prefill_s)
        if longer_s + work_s + loads_s < -_SAME_S:
            return _PRUNED
        if longer_s + work_s + loads_s <= _SAME_S:
            return _TURN
        if loads_s > max(longer_s, work_s):
            return self._words("load_s", loads_s, other)
        if longer_s >= work_s:
            return f"waits {time_words(longer_s)} longer for the prefill worker"
        return self._more_to_compute(other)

    def _decode_rule(self, other: Candidate) -> str | None:
        """Why the decode worker of ``other`` was not taken, where that was not settled by the cost."""
        router, job = self._router, self._job
        objective, costs = job.aims.objective, router.costs
        mine, best = self._endpoint(other.decode), self._endpoint(self._best.decode)
        if mine is best:
            return None
        if self._home is not None and self._home == best.address:
            return f"the conversation is on {best.address}"
        if objective is Objective.RANDOM:
            return "not drawn"
        if objective is Objective.ROUND_ROBIN:
            return "it was another's turn"
        if mine.address in self._decodes:
            return None
        if mine.prefill.busy_until_s > 0 and Role.PREFILL not in mine.roles and best.prefill.busy_until_s <= 0:
            return "a prefill on it would hold up the answer"
        if job.aims.itl_slo_s is not None:
            itl_s, best_itl_s = (costs.decode_rate(each).itl_s(costs.sequences(each, 0.0) + 1) for each in (mine, best))
            if itl_s > job.aims.itl_slo_s >= best_itl_s:
                return f"a token would take {time_words(itl_s)} there, over the ITL SLO"
        more = costs.sequences(mine, 0.0) - costs.sequences(best, 0.0)
        if objective is Objective.LEAST_LOAD:
            return f"runs {more:.0f} answers more" if more > 0 else "it was another's turn"
        if more < 0 and router.scales.crowded(job):
            return "kept free: prompts wait, and answers keep together"
        return _PRUNED

    # -- terms -------------------------------------------------------------------------------------------------------------

    def _terms(self, other: Candidate, *, queue_s: float = 0.0) -> str:
        """The term that decided. ``queue_s``: what ``other`` waits in our queue, and the best one does not."""
        counted, best = self._counted(other), self._counted(self._best)
        more = {name: value - best[name] for name, value in counted.items()}
        more["queue_s"] = queue_s
        total_s = sum(more.values())
        if abs(total_s) <= _SAME_S:
            return _TURN
        if total_s < 0:
            return _PRUNED
        name = max(more, key=lambda each: more[each])
        return self._words(name, more[name], other)

    def _counted(self, candidate: Candidate) -> dict[str, float]:
        """The terms as the objective adds them up."""
        terms, objective = candidate.terms, self._job.aims.objective
        found = {
            "queue_prefill_s": terms.queue_prefill_s,
            "prefill_s": terms.prefill_s,
            "load_s": terms.load_s,
            "transfer_s": terms.transfer_s,
            "handshake_s": terms.handshake_s,
            "overhead_s": terms.overhead_s,
            "penalty_s": terms.penalty_s,
            "queue_decode_s": terms.queue_decode_s,
        }
        if objective is Objective.TTFT:
            return found
        if objective is Objective.THROUGHPUT:
            # Work counts in full, waiting next to nothing.
            found = {name: 0.01 * value for name, value in found.items()}
            found["prefill_s"] += terms.prefill_s
            found["transfer_s"] += terms.transfer_s
        else:
            found["prefill_s"] += terms.hold_s
        return {**found, "generation_s": terms.generation_s, "stall_s": terms.stall_s}

    def _words(self, name: str, more_s: float, other: Candidate) -> str:
        time = time_words(more_s)
        if name == "queue_prefill_s":
            return f"waits {time} longer for the prefill worker"
        if name == "prefill_s":
            return self._more_to_compute(other)
        if name == "transfer_s":
            missing = self._best.cached_decode_tokens - other.cached_decode_tokens
            if missing > 0 and self._best.prefill is not None:
                return f"its decode worker holds {missing:,} tokens less of the prompt: the transfer takes {time} longer"
            return f"the transfer takes {time} longer"
        return {
            "queue_s": f"waits {time} in the queue",
            "load_s": f"loads what it holds for {time}: it is not in its GPU's memory",
            "handshake_s": f"the two have never met: a handshake takes {time}",
            "overhead_s": f"a handoff takes {time} by itself",
            "penalty_s": f"the pair failed a while ago: charged {time}",
            "queue_decode_s": f"waits {time} longer for room on the decode worker",
            "generation_s": f"its answer would take {time} longer beside the others there",
            "stall_s": f"its streams would stand still for {time}, all together",
        }[name]

    def _more_to_compute(self, other: Candidate) -> str:
        less = _cached(self._best) - _cached(other)
        if less > 0:
            return f"holds {less:,} tokens less of the prompt"
        mine, best = other.terms, self._best.terms
        slower_s, hold_s = mine.prefill_s - best.prefill_s, mine.hold_s - best.hold_s
        if slower_s < hold_s and best.hold_s == 0:
            return f"prefill workers are busy: its work counts {time_words(hold_s)} more"
        return f"computes the prompt {time_words(max(0.0, slower_s))} more slowly"

    def _endpoint(self, address: str | None) -> Endpoint:
        found = self._router.pool.get(address or "")
        assert found is not None
        return found


def _cached(candidate: Candidate) -> int:
    """On the worker that computes the prompt."""
    return candidate.cached_decode_tokens if candidate.prefill is None else candidate.cached_prefill_tokens
