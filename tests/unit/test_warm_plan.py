"""Which two workers meet next, and who is warm, in pools of several sizes; time is counted, not waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from extproc.config import WarmUp
from extproc.routing.pairs import Pairs
from extproc.warm_plan import Link, Plan, Worker


class Pool:
    """A plan whose meetings take ``takes_s`` each; ``broken`` says which go wrong."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        *,
        both: int = 0,
        takes_s: float = 1.0,
        broken: Callable[[Link], bool] = lambda _: False,
        **settings: Any,
    ) -> None:
        self.prefills = [f"p{number}" for number in range(prefill)]
        self.decodes = [f"d{number}" for number in range(decode)]
        self.boths = [f"b{number}" for number in range(both)]
        self.lost: set[Link] = set()
        """A handoff of a client's failed between them since they met."""
        self.models: dict[str, frozenset[str]] = {}
        self.policies: dict[str, frozenset[int]] = {}
        self.settings = WarmUp(**settings)
        self.pairs = Pairs(handshake_s=0.5)
        self.plan = Plan(self.settings, self.pairs, jitter=lambda: 0.5)
        self.takes_s = takes_s
        self.broken = broken
        self.now_s = 0.0
        self.under_way: list[tuple[float, Link]] = []
        self.held: list[Link] = []
        self.given_up: list[Link] = []
        self.warm_at_s: dict[str, float] = {}
        self.tell()

    def tell(self) -> None:
        self.plan.workers(
            [
                Worker(
                    address=address,
                    prefill=self.policies.get(address, frozenset((0,))) if address[0] in "pb" else frozenset(),
                    decode=self.policies.get(address, frozenset((0,))) if address[0] in "db" else frozenset(),
                    models=self.models.get(address, frozenset("m")),
                )
                for address in (*self.prefills, *self.decodes, *self.boths)
            ]
        )

    @property
    def met(self) -> set[Link]:
        return {link for link in self.plan.links() if self.pairs.met(*link)}

    def run(self, seconds: float) -> None:
        """Let time pass, a tenth of a second at a time."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-6:
            self.now_s += 0.1
            for entry in [each for each in self.under_way if each[0] <= self.now_s + 1e-6]:
                self.under_way.remove(entry)
                link = entry[1]
                ok = not self.broken(link)
                if ok:
                    self.pairs.succeeded(*link)
                if self.plan.ended(link, None if ok else "broken", self.now_s):
                    self.given_up.append(link)
            self.under_way += [(self.now_s + self.takes_s, link) for link in self.plan.next(self.now_s)]
            self.held += [link for _, link in self.under_way if link not in self.held]
            busy = list(itertools.chain.from_iterable(link for _, link in self.under_way))
            assert len(busy) == len(set(busy)), "a worker has no more than one meeting at a time"
            assert len(self.under_way) <= self.settings.concurrency
            for address in self.plan.warm:
                self.warm_at_s.setdefault(address, self.now_s)
            self.check()

    def check(self) -> None:
        """No client pays: in a small pool all that are warm know each other, or have proven that they cannot."""
        if self.plan.small:
            unknown = set(self.plan.links()) - self.met - self.lost - set(self.given_up)
            assert not [link for link in unknown if self.plan.warm.issuperset(link)]


def test_one_of_each_meet_and_are_warm() -> None:
    pool = Pool(1, 1)
    assert pool.plan.warm == frozenset()
    pool.run(1.2)
    assert pool.plan.warm == {"p0", "d0"}
    assert pool.plan.counts() == (1, 1)
    pool.run(100)
    assert pool.held == [("p0", "d0")], "once is enough"


def test_the_first_pair_of_a_small_pool_is_in_use_at_once_and_the_others_join_it() -> None:
    pool = Pool(2, 3)
    pool.run(1.2)
    assert {"p0", "d0"} <= pool.plan.warm
    assert "p1" not in pool.plan.warm, "it has not met d0, which is in use"
    pool.run(5)
    assert pool.plan.warm == {"p0", "p1", "d0", "d1", "d2"}
    assert pool.plan.counts() == (6, 6)
    assert len(pool.held) == 6
    assert max(pool.warm_at_s.values()) <= 4.6, "six meetings, two at a time"


def test_a_new_decode_worker_is_used_when_it_has_met_every_prefill_worker() -> None:
    pool = Pool(2, 2)
    pool.run(4)
    pool.decodes.append("d2")
    pool.tell()
    assert pool.plan.warm == {"p0", "p1", "d0", "d1"}, "the newcomer keeps nobody from working"
    pool.run(1.2)
    assert "d2" not in pool.plan.warm
    pool.run(1.1)
    assert "d2" in pool.plan.warm


def test_a_new_engine_at_an_old_address_has_met_nobody() -> None:
    pool = Pool(2, 2)
    pool.run(4)
    pool.pairs.part("d1")
    pool.plan.renewed("d1")
    assert pool.plan.warm == {"p0", "p1", "d0"}
    pool.run(2.4)
    assert pool.plan.warm == {"p0", "p1", "d0", "d1"}


def test_a_meeting_with_an_engine_that_was_replaced_meanwhile_is_void() -> None:
    pool = Pool(1, 1)
    [link] = pool.plan.next(0.0)
    pool.plan.renewed("d0")
    assert pool.plan.is_void(link)
    assert pool.plan.ended(link, "gone", 1.0) is False
    assert pool.plan.failing() == [], "that says nothing about the new one"
    assert pool.plan.next(1.0) == [link], "and it is met at once"


def test_a_handoff_of_a_client_that_fails_takes_nobody_out_of_use() -> None:
    pool = Pool(2, 2)
    pool.run(4)
    pool.pairs.failed("p0", "d1", pool.now_s)
    pool.lost.add(Link("p0", "d1"))
    pool.plan.look()
    assert pool.plan.warm == {"p0", "p1", "d0", "d1"}
    pool.run(1.2)
    assert Link("p0", "d1") in pool.met, "but they meet again"


def test_a_worker_that_cannot_meet_anybody_is_named_and_the_others_serve() -> None:
    pool = Pool(2, 2, broken=lambda link: link.decode == "d0", attempts=3, retry_s=50.0)
    pool.run(40)
    assert pool.plan.warm == {"p0", "p1", "d1"}
    assert sorted(pool.given_up) == [("p0", "d0"), ("p1", "d0")], "each once"
    assert [(each.decode, each.given_up, each.reason) for each in pool.plan.failing()] == [("d0", True, "broken")] * 2
    assert pool.plan.why_cold().keys() == {"d0"}
    pool.broken = lambda _: False
    pool.run(60)
    assert "d0" in pool.plan.warm, "it is tried again now and then"
    assert pool.plan.failing() == []


def test_a_pair_that_cannot_meet_costs_neither_of_the_two_its_other_pairs() -> None:
    pool = Pool(2, 2, broken=lambda link: link == ("p0", "d1"), attempts=2)
    pool.run(30)
    assert pool.plan.warm == {"p0", "p1", "d0", "d1"}
    assert pool.given_up == [("p0", "d1")]
    assert pool.plan.counts() == (3, 4)


def test_failures_are_tried_again_later_and_later() -> None:
    pool = Pool(1, 1, broken=lambda _: True, takes_s=0.1, attempts=4, retry_s=60.0)
    began: list[float] = []
    for _ in range(4000):
        before = len(pool.under_way)
        pool.run(0.1)
        if len(pool.under_way) > before or (before and pool.under_way and pool.under_way[0][0] > pool.now_s):
            began.append(round(pool.now_s, 1))
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(began)]
    assert gaps[:5] == [1, 2, 4, 60, 60]


def test_workers_of_different_models_do_not_meet() -> None:
    pool = Pool(2, 2)
    pool.models = {"p1": frozenset("n"), "d1": frozenset("n")}
    pool.tell()
    pool.run(5)
    assert sorted(pool.held) == [("p0", "d0"), ("p1", "d1")]
    assert pool.plan.warm == {"p0", "p1", "d0", "d1"}


def test_workers_that_no_policy_brings_together_do_not_meet() -> None:
    pool = Pool(2, 3)
    pool.policies = {"p1": frozenset((1,)), "d1": frozenset((1,)), "d2": frozenset((0, 1))}
    pool.tell()
    pool.run(6)
    assert sorted(pool.held) == [("p0", "d0"), ("p0", "d2"), ("p1", "d1"), ("p1", "d2")]
    assert pool.plan.warm == {"p0", "p1", "d0", "d1", "d2"}


def test_workers_with_both_roles_meet_both_ways_and_never_themselves() -> None:
    pool = Pool(0, 0, both=3)
    pool.run(10)
    assert len(pool.held) == 6
    assert all(prefill != decode for prefill, decode in pool.held)
    assert pool.plan.warm == {"b0", "b1", "b2"}


def test_who_has_nobody_to_meet_is_neither_warm_nor_held_back() -> None:
    pool = Pool(0, 2)
    pool.run(1)
    assert pool.plan.warm == frozenset()
    assert not pool.plan.has_partners("d0")


@pytest.mark.parametrize(("prefill", "decode"), [(100, 100), (5, 100), (100, 5)])
def test_a_large_pool_is_in_use_before_all_have_met(prefill: int, decode: int) -> None:
    pool = Pool(prefill, decode, concurrency=8, partners=16, background_per_s=2.0)
    pool.run(1.2)
    assert len(pool.plan.warm) >= 10, "five or more pairs, on the first round"
    pool.run(25)
    assert len(pool.plan.warm) == prefill + decode
    # One meeting each, most of them with somebody new too; with five of the one role, five at a time.
    assert max(pool.warm_at_s.values()) <= 1.1 * (100 / min(prefill, decode, 8)) + 2.0
    met = len(pool.met)
    pool.run(10)
    assert 15 <= len(pool.met) - met <= 21, "the rest at two a second"


def test_the_rest_of_a_large_pool_ends_with_so_many_partners_each() -> None:
    pool = Pool(20, 20, takes_s=0.1, partners=4, background_per_s=100.0, concurrency=20)
    pool.run(60)
    for decode in pool.decodes:
        assert 4 <= sum(link.decode == decode for link in pool.met) <= 6
