"""Several processes with one ledger: what each knows of the others, and that it stays true whatever is lost."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from extproc.observe.log_lines import Line
from extproc.processes import facts, ledger, outbox, siblings
from extproc.routing.endpoint_spec import EndpointSet
from extproc.routing.load import Load
from extproc.routing.pool import Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.ticket import RejectedError
from tests.unit.processes_world import Family
from tests.unit.routing_world import chain, placed, specs


def a_line(key: str) -> Line:
    return Line(
        key=key,
        request_id="r",
        mode="",
        status=200,
        flags=(),
        outcome="ok",
        details="via_upstream",
        upstream="d0",
        streamed=True,
        duration_s=1.0,
        ttft_s=0.1,
        generation_s=0.9,
        prompt_tokens=10,
        completion_tokens=20,
        received_bytes=1,
        sent_bytes=2,
    )


def claims(router: Router) -> dict[str, tuple[int, int]]:
    return {each.address: (each.prefill.tokens, each.decode.tokens) for each in router.pool.endpoints}


# -- what one does, the others know ------------------------------------------------------------------------------------------


async def test_a_claim_of_one_is_load_for_the_other_and_not_its_own() -> None:
    async with Family() as family:
        ticket = family[0].apart(4000)
        family.settle()
        prefill, decode = ticket.prefill.address, ticket.decode.address
        assert claims(family[1].router) == claims(family[0].router)
        for address in (prefill, decode):
            requests, tokens, own_requests, own_tokens = family[1].on(address)
            assert (requests, own_requests, own_tokens) == (1, 0, 0)
            assert tokens == family[0].on(address)[1] == family[0].on(address)[3] > 0
        assert family[1][prefill].prefill.busy_until_s == pytest.approx(family[0][prefill].prefill.busy_until_s)


async def test_when_all_is_over_nobody_counts_anything() -> None:
    async with Family(3) as family:
        tickets = [(one, one.apart(1000 + 100 * number)) for number in range(10) for one in family.all]
        family.settle()
        for number, (one, ticket) in enumerate(tickets):
            if number % 3:
                one.prefilled(ticket, tokens=ticket.job.tokens, cached_tokens=0)
                one.router.answered(ticket, family.now_s, ok=True)
            one.finish(ticket)
            family.settle()
        for one in family.all:
            one.assert_empty()
            assert one.messages("missed") == 0


async def test_the_other_goes_where_nothing_is_yet() -> None:
    """Two processes decide one after the other: they must not both take the first worker."""
    async with Family() as family:
        first = family[0].apart(4000, "one")
        family.settle()
        second = family[1].apart(4000, "another")
        assert first.prefill.address != second.prefill.address
        assert first.decode.address != second.decode.address


async def test_a_prefix_that_one_has_placed_draws_the_next_prompt_of_the_other() -> None:
    async with Family() as family:
        ticket = family[0].apart(20_000, "a long document")
        family[0].prefilled(ticket, tokens=20_000, cached_tokens=0)
        family[0].finish(ticket)
        family.settle()
        for _ in range(4):
            again = family[1].apart(20_000, "a long document")
            assert again.prefill.address == ticket.prefill.address
            assert again.decision.candidates[0].cached_prefill_tokens > 19_000
            family[1].finish(again)
            family.settle()


async def test_a_prompt_longer_than_a_message_is_known_by_its_beginning() -> None:
    async with Family() as family:
        long = Chain(array("Q", range(1, 3 * facts.MOST_HASHES)), 64.0)
        family[0].apart(len(long.hashes) * 64, chain=long)
        family.settle()
        assert max(family[1].router.index.lookup(long).values()) == facts.MOST_HASHES


async def test_a_window_is_full_for_all() -> None:
    """A prefill worker takes about one scheduler step; who comes to it by another process waits like anybody."""
    async with Family(step_tokens=4096) as family:
        for worker in range(2):
            assert placed(family[0].apart(4000, f"first {worker}"))
        family.settle()
        waits = family[1].apart(4000, "third")
        assert not placed(waits)


async def test_a_worker_with_room_is_for_whoever_waits_longest_in_any_process() -> None:
    async with Family(step_tokens=4096) as family:
        running = [family[0].apart(4000, f"runs {number}") for number in range(2)]
        family.settle()
        older = family[1].apart(4000, "older")
        family.settle()
        family.now_s += 0.01
        younger = family[0].apart(4000, "younger")
        assert not placed(older) and not placed(younger)
        family.now_s += 0.5
        family[0].prefilled(running[0], tokens=4000, cached_tokens=0)
        assert not placed(younger), "it leaves the worker to the prompt that came first"
        family.settle()
        family[1].poll()
        family.settle()
        assert placed(older) and not placed(younger)
        family[0].prefilled(running[1], tokens=4000, cached_tokens=0)
        assert placed(younger), "nobody has waited longer"


async def test_nobody_waits_for_long_for_a_sibling_that_cannot_use_the_worker() -> None:
    async with Family(step_tokens=4096) as family:
        running = [family[0].apart(4000, f"runs {number}") for number in range(2)]
        family.settle()
        family[1].apart(4000, "older")
        family.settle()
        family.now_s += 0.01
        younger = family[0].apart(4000, "younger")
        family.kill(1)  # it will never take it
        family[0].prefilled(running[0], tokens=4000, cached_tokens=0)
        assert not placed(younger)
        assert family[0].router.next_wake_s() <= family.now_s + 0.005
        family.now_s += 0.005
        family[0].poll()
        assert placed(younger)


async def test_failures_that_one_saw_keep_the_other_off() -> None:
    async with Family(breaker_failures=3) as family:
        for _ in range(3):
            ticket = family[0].apart(4000)
            family[0].router.prefill_failed(ticket, family.now_s, blame=True)
            family[0].finish(ticket)
        family.settle()
        for address in ("p0", "p1"):
            assert family[1][address].prefill.failures == family[0][address].prefill.failures


async def test_speeds_are_learned_from_what_all_saw() -> None:
    async with Family() as family:
        for _ in range(30):
            ticket = family[0].apart(8000, prefill_labels={})
            family.now_s += 2.0
            family[0].prefilled(ticket, tokens=8000, cached_tokens=0)
            family[0].finish(ticket)
            family.settle()
        for address in ("p0", "p1"):
            here, there = (one.router.costs.prefill_rate(one[address]) for one in family.all)
            assert there.seconds(8000) == pytest.approx(here.seconds(8000))
        assert there.seconds(8000) > 1.5, "and it is not the first guess"


async def test_a_limit_of_a_policy_holds_for_all() -> None:
    async with Family() as family:
        tickets = [family[0].apart(100, max_in_flight=3, policy="gold") for _ in range(3)]
        family.settle()
        with pytest.raises(RejectedError, match="3 requests of policy 'gold' are open"):
            family[1].apart(100, max_in_flight=3, policy="gold")
        family[0].finish(tickets[0])
        family.settle()
        assert placed(family[1].apart(100, max_in_flight=3, policy="gold"))


async def test_a_conversation_stays_on_its_decode_worker_in_any_process() -> None:
    async with Family() as family:
        first = family[0].apart(1000, session="chat-1")
        family[0].finish(first)
        family.settle()
        for _ in range(4):
            again = family[1].apart(1000, session="chat-1")
            assert again.decode.address == first.decode.address
            family[1].finish(again)


async def test_pairs_that_have_met_and_parted_are_known_to_all() -> None:
    async with Family() as family:
        family[0].router.told.met("p0", "d1")
        family[0].router.costs.pairs.succeeded("p0", "d1")
        family.settle()
        assert family[1].router.costs.pairs.met("p0", "d1")
        family[1].router.told.parted("p0", "d1")
        family.settle()
        assert not family[0].router.costs.pairs.met("p0", "d1")


async def test_a_worker_that_is_new_to_one_is_asked_of_the_leader() -> None:
    """A follower that sees a worker late would else take it for cold although the leader has warmed it."""
    async with Family() as family:
        family[0].router.costs.pairs.succeeded("p0", "d0")
        family[1].router.told.renewed("p0")
        family.settle()
        assert family[1].router.costs.pairs.met("p0", "d0")


async def test_what_the_leader_scrapes_counts_for_all() -> None:
    async with Family() as family:
        ticket = family[0].apart(1000)
        family.settle()
        load = Load(running=5.0, waiting=0.0)
        address = ticket.decode.address
        family[0].dispatcher.on_load(address, load)
        family[0].router.told.reported(address, load)
        family.settle()
        for one in family.all:
            assert one[address].decode.external_requests == 4.0, "the request of one of us is not somebody else's"


async def test_a_new_engine_is_found_once_for_all() -> None:
    async with Family() as family:
        for one in family.all:
            one.warm("p0", "text", 6400)
        family[0].dispatcher.engine_told("p0", "engine-1")
        family[0].router.told.new_engine("p0", "engine-1")
        family.settle()
        assert family[1].router.index.held("p0") == 100, "the first one that is heard of is no change"
        family[0].dispatcher.engine_told("p0", "engine-2")
        family[0].router.told.new_engine("p0", "engine-2")
        family.settle()
        assert [one.router.index.held("p0") for one in family.all] == [0, 0]
        assert family[1].log.events().count("worker_restarted") == 1


# -- lines of the access log -------------------------------------------------------------------------------------------------


async def test_a_line_finds_the_process_that_served_the_request() -> None:
    async with Family(3) as family:
        got: list[tuple[int, str]] = []
        for one in family.all:
            one.siblings.on_line = lambda line, index=one.index: got.append((index, line.key))
        key = f"{family[2].siblings.epoch}-7"
        assert family[0].siblings.pass_on(a_line(key))
        family.settle()
        assert got == [(2, key)]
        assert not family[0].siblings.pass_on(a_line("0badcafe-1")), "a name that no process here gave"
        assert not family[0].siblings.pass_on(a_line("")), "no name at all"


async def test_a_process_knows_when_no_line_can_come_any_more() -> None:
    async with Family() as family:
        assert family[0].siblings.quiet()
        family[1].siblings.load = lambda: (0, 1)
        family.wait(0.5)
        assert family[0].siblings.at_rest() and not family[0].siblings.quiet()
        family[1].siblings.load = lambda: (1, 0)
        family.wait(0.5)
        assert not family[0].siblings.at_rest()
        family.kill(1)
        family.wait(0.5)
        assert family[0].siblings.quiet(), "who is gone awaits nothing"


# -- what is lost ------------------------------------------------------------------------------------------------------------


async def test_a_datagram_that_is_lost_is_noticed_and_the_ledger_heals() -> None:
    async with Family() as family:
        kept = family[0].apart(1000, "kept")
        family.settle()
        family.posts.lose = lambda sender, _to, _batch: sender == 0
        gone = family[0].apart(2000, "lost claim")
        family[0].finish(kept)
        family.settle()
        family.posts.lose = lambda *_: False
        assert claims(family[1].router) != claims(family[0].router)
        family.wait(1.0)
        assert claims(family[1].router) == claims(family[0].router)
        assert family[1].messages("missed") >= 1
        family[0].finish(gone)
        family.settle()
        for one in family.all:
            one.assert_empty()


async def test_claims_that_are_told_again_are_not_counted_twice_and_never_vanish_meanwhile() -> None:
    async with Family() as family:
        for number in range(20):
            family[0].apart(1000 + number)
        family.settle()
        before = claims(family[1].router)
        family[1].siblings._ask(family[1].siblings._siblings[0])
        family.settle()
        assert claims(family[1].router) == before


async def test_a_ledger_that_differs_without_a_lost_datagram_heals_too() -> None:
    async with Family() as family:
        family[0].apart(1000)
        family.settle()
        other = family[1].siblings._siblings[0].another
        other.release(1, family.now_s)
        assert claims(family[1].router) != claims(family[0].router)
        family.wait(1.0)
        assert claims(family[1].router) == claims(family[0].router)


async def test_whoever_does_not_read_is_told_everything_again_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_MOST_BYTES", 20_000)
    async with Family() as family:
        family.posts.full.add(1)
        tickets = [family[0].apart(6400, f"prompt {number}", held=False) for number in range(200)]
        box = family[0].siblings._siblings[1].outbox
        assert box._bytes <= 20_000
        assert family[0].messages("overflow") >= 1
        family.posts.full.clear()
        monkeypatch.setattr(outbox, "_MOST_BYTES", 1 << 20)
        family.wait(1.0)
        assert claims(family[1].router) == claims(family[0].router)
        for ticket in tickets:
            family[0].finish(ticket)
        family.wait(0.5)
        for one in family.all:
            one.assert_empty()


async def test_what_waits_is_sent_in_order_once_there_is_room() -> None:
    async with Family() as family:
        family.posts.full.add(1)
        ticket = family[0].apart(1000)
        family.settle()
        family[0].finish(ticket)
        family.settle()
        assert family[0].messages("waited") >= 1
        family.posts.full.clear()
        family.settle()
        assert family[1].messages("missed") == 0
        family[1].assert_empty()


# -- processes that go and come ----------------------------------------------------------------------------------------------


async def test_a_process_that_dies_takes_its_share_with_it_at_once() -> None:
    async with Family() as family:
        family[1].apart(4000)
        mine = family[0].apart(1000)
        family.settle()
        family.kill(1)
        family.wait(0.25)
        assert family[0].siblings._siblings[1].another.claims == 0
        assert sum(family[0].on(each.address)[0] for each in family[0].pool.endpoints) == 2, "its own two legs stay"
        assert "sibling_gone" in family[0].log.events()
        family[0].finish(mine)
        family[0].assert_empty()


async def test_a_process_that_stands_still_is_given_up_after_a_while_and_comes_back_whole() -> None:
    async with Family() as family:
        family[1].apart(4000)
        family.settle()
        stopped = family.posts.open.pop(1)
        family.posts.open[1] = lambda _data: None  # its socket is there, and nobody reads
        before_s = family.now_s
        while family[0].siblings._siblings[1].another.claims:
            family.now_s += 0.25
            family[0].siblings.tick()
            family[0].siblings.flush()
            family.posts.deliver()
        assert ledger.SILENCE_S < family.now_s - before_s < ledger.SILENCE_S + 0.6
        family.posts.open[1] = stopped
        family.wait(1.0)
        assert claims(family[1].router) == claims(family[0].router)
        assert family[0].siblings._siblings[1].another.claims == 2


async def test_a_process_that_is_started_again_learns_what_is_on_the_workers_and_what_they_hold() -> None:
    async with Family() as family:
        done = family[0].apart(64_000, "a document")
        family[0].prefilled(done, tokens=64_000, cached_tokens=0)
        family[0].finish(done)
        running = family[0].apart(4000)
        limited = family[0].apart(100, max_in_flight=1, policy="gold")
        family.settle()
        again = await family.start_again(1)
        family.wait(0.5)
        assert claims(again.router) == claims(family[0].router)
        assert again.router.index.lookup(chain("a document", 64_000)) == family[0].router.index.lookup(
            chain("a document", 64_000)
        )
        with pytest.raises(RejectedError):
            again.apart(100, max_in_flight=1, policy="gold")
        for ticket in (running, limited):
            family[0].finish(ticket)
        family.settle()
        again.assert_empty()


async def test_a_claim_on_a_worker_that_is_not_known_yet_counts_as_soon_as_it_is() -> None:
    async with Family() as family:
        more = EndpointSet(prefill=specs("p", 3), decode=specs("d", 2))
        family[0].pool.replace(more)
        family[0].pool.set_live(family[0]["p2"], True)
        for number in range(3):
            family[0].apart(4000, f"prompt {number}")
        family.settle()
        assert family[1].siblings._siblings[0].another.claims == 6
        assert family[1].messages("missed") == 0
        family[1].pool.replace(more)
        family.wait(0.25)
        assert family[1]["p2"].prefill.tokens == family[0]["p2"].prefill.tokens > 0


# -- the leader --------------------------------------------------------------------------------------------------------------


async def test_the_lowest_process_that_knows_its_workers_leads() -> None:
    async with Family(3) as family:
        assert [one.siblings.leads() for one in family.all] == [True, False, False]
        led: list[int] = []
        for one in family.all:
            one.siblings.on_lead = lambda index=one.index: led.append(index)
        family.kill(0)
        family.wait(0.5)
        assert [one.siblings.leads() for one in family.all[1:]] == [True, False]
        assert led == [1]
        family.wait(siblings._START_S)
        family.all[0] = await family.start(0, restarts=1)
        family.settle()
        assert [one.siblings.leads() for one in family.all] == [False, True, False], "one that has just begun knows nothing"
        family[0].siblings.settled()
        family.settle()
        assert [one.siblings.leads() for one in family.all] == [True, False, False]


async def test_alone_from_the_start_the_first_one_leads_at_once_and_the_second_waits_for_it() -> None:
    family = Family()
    second = await family.start(1)
    assert not second.siblings.leads()
    family.now_s += siblings._START_S + 0.1
    assert second.siblings.leads(), "there is no first one"
    first = await family.start(0)
    assert first.siblings.leads()
    for one in (first, second):
        one.siblings.close()


# -- what is no batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1" * 100,
        b"\x93" * 5000,
        b"\x90",
    ],
)
async def test_bytes_that_are_no_batch_are_counted_and_left(data: bytes) -> None:
    async with Family() as family:
        family[0].siblings.take(data)
        assert family[0].messages("malformed") == 1
        assert family[0].siblings._siblings[1].epoch is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", -1),
        ("tokens", 2**70),
        ("work_s", float("nan")),
        ("work_s", float("inf")),
        ("address", "x" * 600),
        ("late", 3),
    ],
)
async def test_a_number_that_makes_no_sense_changes_nothing(field: str, value: Any) -> None:
    values = {"number": 1, "prefill": True, "address": "p0", "tokens": 5, "work_s": 0.1, "since_s": 1.0, "late": False}
    values[field] = value
    async with Family() as family:
        header = family[1].siblings._header(family[1].siblings._siblings[0])
        head = msgspec.to_builtins(header)
        try:
            data = msgspec.msgpack.encode([head, 50, [[1, *values.values()]]])
        except OverflowError:
            return
        family[0].siblings.take(data)
        assert family[0].messages("malformed") == 1
        family[0].assert_empty()


async def test_a_batch_of_a_process_that_there_is_not_is_left() -> None:
    async with Family() as family:
        header = facts.Header(sender=5, epoch="e", settled=True, first=None, open_streams=0, awaited_lines=0, claims=None)
        family[0].siblings.take(facts.batch(header, 1, []))
        assert family[0].messages("malformed") == 1


async def test_hashes_of_no_whole_number_are_left_and_the_rest_of_the_batch_counts() -> None:
    async with Family() as family:
        header = family[1].siblings._header(family[1].siblings._siblings[0])
        number = family[0].siblings._siblings[1].number + 1
        told = [facts.Learned("p0", b"123", 64.0), facts.Claimed(1, True, "p0", 5, 0.1, 1.0, False)]
        family[0].siblings.take(facts.batch(header, number, [facts.encode(each) for each in told]))
        assert family[0].messages("malformed") == 1
        assert family[0]["p0"].leg(Role.PREFILL).tokens == 5
