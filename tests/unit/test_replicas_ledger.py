"""Replicas share one ledger although their clocks have nothing to do with each other; alone, each has only its own."""

from __future__ import annotations

import msgspec
import pytest

from extproc.processes import facts
from extproc.routing.load import Load
from extproc.routing.ticket import State
from tests.unit.replicas_world import Group, One


def tokens_on(one: One, address: str) -> tuple[int, int]:
    """All tokens on a prefill worker, and our own."""
    leg = one[address].prefill
    return leg.tokens, leg.own_tokens


async def test_the_load_of_one_is_load_for_the_other() -> None:
    async with Group() as group:
        first = group[0].apart(4000, "one")
        group.settle()
        assert tokens_on(group[1], first.prefill.address) == (4000, 0)
        second = group[1].apart(4000, "another")
        assert first.prefill.address != second.prefill.address
        group[0].finish(first)
        group[1].finish(second)
        group.settle()
        for one in (group[0], group[1]):
            one.assert_empty()


async def test_a_claim_is_as_old_on_a_clock_that_is_a_day_ahead_or_behind() -> None:
    async with Group(3) as group:
        tickets = [group[number].apart(4000, f"of {number}") for number in range(3)]
        group.settle()
        group.now_s += 3.0
        for one in (group[0], group[1], group[2]):
            for ticket in tickets:
                busy_s = one[ticket.prefill.address].prefill.busy_until_s - one.now_s
                owner = next(
                    each for each in group.all.values() if each.router.pool.get(ticket.prefill.address) is ticket.prefill
                )
                there_s = owner[ticket.prefill.address].prefill.busy_until_s - owner.now_s
                assert busy_s == pytest.approx(there_s, abs=1e-6)


async def test_speeds_are_learned_from_what_a_replica_with_another_clock_saw() -> None:
    async with Group() as group:
        for _ in range(30):
            ticket = group[0].apart(8000)
            group.now_s += 2.0
            group[0].prefilled(ticket, tokens=8000, cached_tokens=0)
            group[0].finish(ticket)
            group.settle()
        here, there = (one.router.costs.prefill_rate(one["p0"]) for one in (group[0], group[1]))
        assert there.seconds(8000) == pytest.approx(here.seconds(8000), rel=1e-3)
        assert there.seconds(8000) > 1.5, "and it is not the first guess"


async def test_the_prompt_that_waits_longest_is_first_whatever_the_clocks_say() -> None:
    async with Group(step_tokens=4096) as group:
        running = [group[0].apart(4000, f"runs {number}") for number in range(2)]
        group.settle()
        older = group[1].apart(4000, "older")  # its clock is a day ahead: it would seem to come last
        group.settle()
        group.now_s += 0.01
        younger = group[0].apart(4000, "younger")
        group.now_s += 0.5
        group[0].prefilled(running[0], tokens=4000, cached_tokens=0)
        group.settle()
        group[1].poll()
        assert older.state is State.PLACED and younger.state is not State.PLACED


async def test_a_new_replica_learns_load_and_prefixes_before_its_first_decision() -> None:
    async with Group(1) as group:
        known = group[0].apart(20_000, "a long document")
        group[0].prefilled(known, tokens=20_000, cached_tokens=0)
        held = group[0].apart(4000, "held")
        await group.start("new")
        await group[1].replicas.taught()
        assert tokens_on(group[1], held.prefill.address)[0] >= 4000
        again = group[1].apart(20_000, "a long document")
        assert again.prefill.address == known.prefill.address
        assert again.decision.candidates[0].cached_prefill_tokens > 19_000


async def test_the_share_of_a_replica_goes_with_it_and_what_it_knew_stays() -> None:
    async with Group() as group:
        ticket = group[1].apart(20_000, "a long document")
        group[1].prefilled(ticket, tokens=20_000, cached_tokens=0)
        group[1].apart(4000, "open")
        group.settle()
        group.kill("r1")
        assert group[0].replicas._siblings == {}
        for address in ("p0", "p1"):
            assert tokens_on(group[0], address) == (0, 0)
        assert group[0].messages("gone") == 1
        again = group[0].apart(20_000, "a long document")
        assert again.prefill.address == ticket.prefill.address


async def test_a_restarted_one_is_another_one() -> None:
    async with Group() as group:
        group[1].apart(4000, "lost")
        group.settle()
        group.kill("r1")
        await group.start("r1")
        assert [tokens_on(group[0], address)[0] for address in ("p0", "p1")] == [0, 0]
        ticket = group[1].apart(4000, "again")
        group.settle()
        assert tokens_on(group[0], ticket.prefill.address) == (4000, 0)
        assert group[0].messages("missed") == 0


async def test_a_partition_leaves_each_with_its_own_and_is_healed_by_a_connection() -> None:
    async with Group() as group:
        mine, theirs = group[0].apart(4000, "mine"), group[1].apart(3000, "theirs")
        group.settle()
        group.network.cut("r0", "r1")
        for one, own in ((group[0], mine), (group[1], theirs)):
            total = sum(tokens_on(one, address)[0] for address in ("p0", "p1"))
            assert total == own.job.tokens
        group[0].finish(mine)  # while nobody hears it
        later = group[1].apart(2000, "later")
        group.network.connect("r0", "r1")
        group.settle()
        assert sum(tokens_on(group[0], address)[0] for address in ("p0", "p1")) == 3000 + 2000
        group[1].finish(theirs)
        group[1].finish(later)
        group.settle()
        for one in (group[0], group[1]):
            one.assert_empty()


async def test_one_that_is_silent_on_an_open_connection_is_given_up() -> None:
    async with Group() as group:
        group[1].apart(4000, "open")
        group.settle()
        group.network.ends["r1"].full = True  # it stands still: nothing comes of it any more
        group.wait(2.5)
        assert "r1" not in group.network.ends["r0"].indices
        assert all(tokens_on(group[0], address)[0] == 0 for address in ("p0", "p1"))
        gone = [line for line in group[0].log.lines if line["event"] == "replica_gone"]
        assert [(line["replica"], line["why"], line["claims"]) for line in gone] == [("r1", "silent", 2)]


async def test_each_asks_the_workers_by_itself() -> None:
    """What a worker reports must not come by way of another replica: it is all that is left when that is away."""
    async with Group() as group:
        group.network.seen.clear()
        group[0].router.told.reported("p0", Load(running=5.0))
        group.wait(1.0)
        told = [fact for _, _, batch in group.network.seen for fact in batch.facts]
        assert not any(isinstance(fact, facts.Reported) for fact in told)


async def test_one_leads_and_another_one_when_it_is_gone() -> None:
    async with Group(3) as group:
        assert [one.replicas.leads() for one in group.all.values()] == [True, False, False]
        group.kill("r0")
        assert [one.replicas.leads() for one in group.all.values()] == [True, False]


async def test_a_line_of_the_log_reaches_the_replica_whose_request_it_is() -> None:
    async with Group(3) as group:
        assert group[0].replicas._owner(f"{group[2].replicas.epoch}-17").name == "r2"
        assert group[0].replicas._owner("ffff-1") is None


async def test_a_reader_of_the_former_header_is_not_given_up() -> None:
    """Fields that are added at the end of a header have a default: within a version both sides read each other."""
    header = facts.Header(sender=0, epoch="e", settled=True, first=None, open_streams=0, awaited_lines=0, claims=0)
    short = msgspec.msgpack.encode([list(msgspec.to_builtins(header))[:7], 1, []])
    assert facts.read(short).header.clock_s is None


async def test_health_says_who_is_connected() -> None:
    async with Group() as group:
        group.wait(1.0)
        [shown] = group[0].replicas.status()["connected"].values()
        assert (shown["state"], shown["claims"]) == ("settled", 0)
        assert shown["lag_s"] < 0.3
