"""A snapshot is complete: a router made from it decides like the one that it is of; taking it changes nothing."""

from __future__ import annotations

import random
from array import array
from contextlib import suppress

import msgspec
import pytest

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.explain import Explanation, explain, explain_snapshot
from extproc.routing.job import Aims, Job, Late, Mode, Objective
from extproc.routing.load import Load
from extproc.routing.picker import NoEndpointError
from extproc.routing.pool import Claim, Leg, Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.queue import PrefillQueue, Waiting
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.snapshot import Snapshot, hashed, restore, take
from extproc.routing.ticket import RejectedError, State, Ticket

PREFILL = [f"10.0.0.{i}:1" for i in range(3)]
DECODE = [f"10.0.1.{i}:1" for i in range(4)]


def a_router(settings: Routing | None = None, *, both: bool = True) -> Router:
    pool = Pool(
        EndpointSet(
            tuple(EndpointSpec(address=address, labels={"zone": "a"}) for address in PREFILL),
            tuple(EndpointSpec(address=address, max_seqs=4) for address in DECODE),
            (EndpointSpec(address="10.0.2.0:1", prefill_tokens_per_s=5_000.0),) if both else (),
        )
    )
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    return Router(pool, settings or Routing())


def a_job(rng: random.Random, now_s: float, aims: Aims | None = None) -> Job:
    """One of a few conversations, at some length."""
    blocks = rng.randint(1, 200)
    head = random.Random(rng.randint(0, 5))
    hashes = array("Q", [head.getrandbits(64) for _ in range(blocks)])
    return Job(
        model=None,
        chain=Chain(hashes, 64.0),
        tokens=blocks * 64 + 10,
        aims=aims or an_aim(rng),
        arrived_s=now_s - rng.choice((0.0, 0.01)),
        deadline_s=now_s + 50,
        tenant=rng.choice(("", "ann", "bob")),
        session=rng.choice(("", "", "s1", "s2")),
        answer_tokens=rng.choice((None, 10, 2_000)),
        size_bytes=blocks * 256,
        handoff=rng.random() > 0.1,
    )


def an_aim(rng: random.Random) -> Aims:
    mode = rng.choice(list(Mode))
    return Aims(
        policy=rng.choice(("one", "two")),
        mode=mode,
        objective=rng.choice([Objective.BALANCED, Objective.BALANCED, *Objective]),
        held=rng.random() > 0.2,
        ttft_slo_s=rng.choice((None, 0.5, 2.0)),
        itl_slo_s=rng.choice((None, 0.021, 0.1)),
        threshold_uncached_tokens=1_000 if mode is Mode.AUTO and rng.random() < 0.2 else None,
        late=rng.choice(list(Late)),
        max_in_flight=rng.choice((None, None, 20)),
        weight=rng.choice((1.0, 3.0)),
        priority=rng.choice((0, 0, -5)),
    )


def live_through(router: Router, rng: random.Random, steps: int) -> float:
    """Some traffic, failures and reports; the time after it."""
    now_s, tickets = 1_000.0, []
    for _ in range(steps):
        now_s += rng.choice((0.0, 0.01, 0.2))
        what = rng.random()
        placed = [each for each in tickets if each.state is State.PLACED]
        if what < 0.5:
            with suppress(RejectedError, NoEndpointError):
                tickets.append(router.submit(a_job(rng, now_s), now_s))
        elif what < 0.65 and placed:
            router.prefill_done(rng.choice(placed), now_s, cached_tokens=rng.choice((None, 0, 64)))
        elif what < 0.75 and placed:
            router.prefill_failed(rng.choice(placed), now_s, blame=True)
        elif what < 0.85 and placed:
            router.answered(rng.choice(placed), now_s, ok=rng.random() > 0.3, pair_fault=True)
        elif what < 0.92 and placed:
            router.finish(rng.choice(placed), now_s)
        else:
            load = Load(running=float(rng.randint(0, 9)), itl_s=0.03, transfer_s=0.02, transfer_bytes=1e8)
            router.on_load(rng.choice([*PREFILL, *DECODE]), load, now_s)
        router.poll(now_s)
    return now_s


def through_json(router: Router, now_s: float) -> Snapshot:
    return msgspec.json.decode(msgspec.json.encode(take(router, now_s, index_blocks=100_000)), type=Snapshot)


def at_zero(job: Job, now_s: float) -> Job:
    return msgspec.structs.replace(job, arrived_s=job.arrived_s - now_s, deadline_s=job.deadline_s - now_s)


def really(router: Router, job: Job, now_s: float) -> tuple[object, ...]:
    """What the router does, in few words."""
    try:
        ticket = router.submit(job, now_s)
    except (RejectedError, NoEndpointError) as error:
        return "rejected", str(error)
    if ticket.error is not None:
        return "rejected", str(ticket.error)
    if ticket.decision is None:
        assert ticket.waiting is not None
        return "waits", ticket.waiting.position
    return "placed", ticket.decision.prefill, ticket.decision.decode, ticket.decision.reason


def as_explained(found: Explanation) -> tuple[object, ...]:
    if found.refusal is not None:
        return "rejected", found.refusal.message
    if found.decision is None:
        return "waits", found.behind
    return "placed", found.decision.prefill, found.decision.decode, found.decision.reason


@pytest.mark.parametrize("seed", range(40))
def test_after_any_history_both_explanations_say_what_then_happens_and_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    router = a_router(Routing(window=4, step_tokens=4096))
    now_s = live_through(router, rng, 30 + seed * 4)
    for _ in range(5):
        job = a_job(rng, now_s)
        before = take(router, now_s, index_blocks=100_000)
        live = explain(router, job, now_s)
        assert take(router, now_s, index_blocks=100_000) == before
        assert explain_snapshot(through_json(router, now_s), at_zero(job, now_s)) == live
        assert as_explained(live) == really(router, job, now_s)


def test_the_histories_of_these_tests_have_every_outcome_in_them() -> None:
    seen = set()
    for seed in range(40):
        rng = random.Random(seed)
        router = a_router(Routing(window=4, step_tokens=4096))
        now_s = live_through(router, rng, 30 + seed * 4)
        seen |= {explain(router, a_job(rng, now_s), now_s).outcome for _ in range(5)}
    assert seen == {"placed", "waits", "rejected"}


def nameless(taken: Snapshot) -> tuple[object, ...]:
    """Without names of clients, which are hashed once more each time."""
    queue = taken.queue
    return (
        [msgspec.structs.replace(each, tenant="", session="") for each in queue.waiting],
        sorted((each.priority, each.served_s, each.weight) for each in queue.lines),
        msgspec.structs.replace(queue, waiting=[], lines=[]),
        msgspec.structs.replace(taken, queue=type(queue)(), sessions={}),
    )


def test_a_snapshot_of_a_restored_router_is_the_same_snapshot() -> None:
    seen: set[str] = set()
    for seed in range(40):
        router = a_router(Routing(window=4, step_tokens=4096), both=seed % 2 == 0)
        now_s = live_through(router, random.Random(seed), 200)
        first = through_json(router, now_s)
        again = restore(first)
        assert nameless(through_json(again, 0.0)) == nameless(first)
        assert again._impatient == router._impatient
        seen |= {f"late {each.late}" for each in first.queue.waiting}
        seen |= {f"undecided {each.undecided}" for each in first.queue.waiting}
        seen |= {f"late on a worker {each.prefill.late_requests > 0}" for each in first.endpoints}
        seen |= {f"served {each.served_s > 0}" for each in first.queue.lines}
    assert len(seen) == 8, "the histories have all of this in them"


def test_names_that_clients_choose_are_hashed() -> None:
    router = a_router(both=False)
    job = a_job(random.Random(1), 0.0, Aims())
    job.session, job.tenant = "conversation-of-ann", "ann@example.org"
    while router.submit(job, 0.0).state is State.PLACED:
        job = msgspec.structs.replace(job, answer_tokens=5)
    text = msgspec.json.encode(take(router, 0.0, index_blocks=1_000)).decode()
    assert "ann" not in text
    assert hashed("conversation-of-ann") in text and hashed("ann@example.org") in text


def test_the_index_is_cut_to_the_last_used_blocks_of_each_worker_and_says_so() -> None:
    router = a_router()
    for number, address in enumerate((PREFILL[0], PREFILL[1])):
        for turn in range(3):
            hashes = array("Q", [number << 32 | turn << 16 | i for i in range(100)])
            router.index.insert(address, Chain(hashes, 64.0))
    whole = take(router, 0.0, index_blocks=1_000)
    assert whole.cut == {} and whole.index is not None
    cut = take(router, 0.0, index_blocks=240)
    assert cut.index is not None and cut.cut == {"index": 360}
    again = restore(cut)
    for address, number in ((PREFILL[0], 0), (PREFILL[1], 1)):
        newest = Chain(array("Q", [number << 32 | 2 << 16 | i for i in range(100)]), 64.0)
        assert again.index.matched(newest, address) == 100, "the last prompt is there, whole"
        assert again.index.held(address) == 120
    assert take(router, 0.0).index is None


def test_nothing_is_asked_of_an_index_that_was_not_taken() -> None:
    router = a_router()
    job = a_job(random.Random(1), 0.0, Aims(mode=Mode.DISAGGREGATE))
    router.finish(router.submit(job, 0.0), 0.0)
    assert any(each.cached_prefill_tokens for each in explain(router, job, 0.0).candidates)
    found = explain_snapshot(take(router, 0.0), job)
    assert not any(each.cached_prefill_tokens for each in found.candidates)


def test_a_long_queue_is_cut_but_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.routing.snapshot._MOST_WAITING", 3)
    router = a_router(Routing(step_tokens=1))
    rng = random.Random(1)
    aims = Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=1_000.0)
    jobs = [a_job(rng, 0.0, aims) for _ in range(20)]
    for job in jobs:
        job.handoff = True
        router.submit(job, 0.0)
    waiting = len(router.queue)
    assert waiting > 3
    taken = take(router, 0.0)
    assert (taken.queue.requests, len(taken.queue.waiting), taken.cut) == (waiting, 3, {"waiting": waiting - 3})
    found = explain(router, jobs[0], 0.0)
    assert (found.outcome, found.behind, found.queue_requests) == ("waits", waiting, waiting)


def test_whoever_gives_the_router_more_to_know_meets_this_test() -> None:
    """Every attribute below is in a snapshot, follows from what is, or does not matter to a decision."""
    assert set(Ticket.__slots__) <= {
        *(
            "weighed",
            "hits",
            "warmest",
            "candidates",
            "decision",
            "decode",
            "decode_claim",
            "decode_holds",
            "error",
            "job",
            "prefill",
            "prefill_claim",
        ),
        *("sent_s", "state", "stuck", "undecided", "waiting", "whole_reason"),
        *("hits_s", "prefill_sent", "decode_sent", "check"),  # none of it where hits are given, and no worker is asked
        *("prefill_rank", "decode_rank"),  # what its legs say once it is placed
    }
    assert set(Leg.__slots__) <= {
        *("_ended_s", "blocked_until_s", "busy_until_s", "claims", "external_requests", "external_s", "failures"),
        "external_tokens",
        *("others", "others_tokens", "tokens", "trial", "turn", "version"),  # others: part of the claims
    }
    assert set(Claim.__slots__) <= {"another", "late", "leg", "since_s", "tokens", "work_s"}
    assert set(Waiting.__slots__) <= {"came_s", "job", "kind", "late", "limit_s", "line", "position", "slo_s", "work_s"}
    router = a_router()
    assert set(vars(router)) <= {
        *("pool", "settings", "index", "costs", "picker", "queue", "predicted_tokens", "reported_tokens", "_turn", "_tickets"),
        *("_heads", "_in_flight", "_impatient", "_changed", "_last_poll_s", "_settled", "scales"),
        # Claims of others are in the ledger, their open requests in those of the snapshot; what is left is milliseconds.
        *("told", "others", "_yielding_s", "_ours_from_s", "_freed_s", "_looked_up_s"),
        "known",  # millions of blocks of what workers say: a snapshot has what they said of the prompts that wait
    }
    assert set(vars(router.picker)) <= {
        *("_pool", "_costs", "_settings", "_random", "_groups", "_meet", "_version", "_sessions", "panics"),
    }
    assert set(vars(router.costs)) <= {
        *("settings", "pairs", "back", "_prefill", "_decode", "_transfer", "_latest", "_guess", "_uncached_tokens"),
        "_loads",
        # Only what the next report of a worker will be about; no decision reads it.
        "_sources",
    }
    assert set(vars(PrefillQueue(Routing()))) <= {
        *(
            "_settings",
            "_bands",
            "_all",
            "_order",
            "_limits",
            "_count",
            "_work_s",
            "_aged_work_s",
            "bytes",
            "queued_s",
            "crowds",
        ),
    }


def test_roles_and_their_names_are_those_of_the_pool() -> None:
    taken = through_json(a_router(), 0.0)
    assert [(each.address, each.roles) for each in taken.endpoints][-1] == ("10.0.2.0:1", [Role.DECODE, Role.PREFILL])
