"""One filter among others of the same workers: what it does is told to them, what they did is applied to its own router.

The others are processes on the same machine (:mod:`.siblings`) or replicas elsewhere (:mod:`extproc.replicas`); who they are
and who leads is theirs to say. No I/O here: batches go out through a :class:`Poster`, and come in by :meth:`SharedLedger.take`.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import msgspec

from extproc.dispatcher import Dispatcher
from extproc.observe.log_lines import Line
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.sighting import Sighting
from extproc.processes import facts
from extproc.processes.facts import Batch, Fact
from extproc.processes.outbox import Outbox
from extproc.processes.post import Sent
from extproc.routing.load import Load
from extproc.routing.pool import Claim, Role
from extproc.routing.prefix import Chain
from extproc.routing.told import Another, Told

BEAT_S = 0.25
"""A sibling hears of us at least so often."""
SILENCE_S = 2.0
"""A sibling that was not heard for so long has no share in the ledger."""
_GATHER_S = 0.001
"""Shortest time between two datagrams to one sibling."""
_LATER_S = 0.01
"""How long what nobody waits for may wait for company: a datagram costs more than what is in it."""
_FULL_S = 0.002
"""Until the next attempt after a sibling had not read the last ones."""
_ASK_AGAIN_S = 0.5
JOIN_S = 1.0
"""How long a process that starts waits for what the others have to tell."""
TEACH_S = 3.0
"""And how long for all that they know of what workers hold, without which its first prompts would go to the wrong workers."""
_MOST_NAME = 512


def new_epoch() -> str:
    """The name of a life of a process. Names of its requests begin with it."""
    return os.urandom(4).hex()


class Poster(Protocol):
    """Carries batches. Never waits."""

    def send(self, index: int, data: bytes) -> Sent:
        """To one of the others."""


class Sibling:
    """What is known of one of the others."""

    def __init__(self, index: int, name: int | str, another: Another) -> None:
        self.index = index
        self.name = name
        """For people."""
        self.another = another
        self.outbox = Outbox()
        self.epoch: str | None = None
        """None: it is not there."""
        self.number = 0
        self.heard_s = -math.inf
        self.shift_s = 0.0
        """What to add to its times, to have them on our clock."""
        self.settled = False
        self.open_streams = self.awaited_lines = 0
        self.asked_s = -math.inf
        self.untold = True
        """Something that it said was not heard, and it has not begun to tell its claims again."""
        self.retell = False
        """Our claims are to be told again, as soon as it reads."""
        self.sent_s = -math.inf
        self.due = False
        """A header is to be sent, facts or none."""


class SharedLedger(Told):
    """The others, as one of them sees them. ``run`` must be running."""

    kind: ClassVar[str]
    """What one of the others is called in logs."""
    shown_as: ClassVar[str]
    """Where :meth:`status` stands at `/healthz`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        post: Poster,
        *,
        index: int,
        epoch: str,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index``: our own, in what we send. ``epoch``: see :func:`new_epoch`."""
        self.index = index
        self.epoch = epoch
        self.silence_s = SILENCE_S
        self._dispatcher = dispatcher
        self._router = dispatcher.router
        self._post = post
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._siblings: dict[int, Sibling] = {}
        """By index."""
        self._numbers: dict[Claim, int] = {}
        self._roles: dict[int, tuple[Claim, Role, str]] = {}
        self._next = 0
        self._open_requests: dict[str, int] = {}
        self._settled = False
        self._started_s = clock()
        self._led: bool | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._joined = asyncio.Event()
        self._taught = asyncio.Event()
        self.on_lead: Callable[[], None] = lambda: None
        """Called when this process becomes the leader."""
        self.on_line: Callable[[Line], None] = lambda _line: None
        """Gets lines of the access log of requests of this process."""
        self.on_sighting: Callable[[Sighting], None] = lambda _sighting: None
        """Gets what was seen of streams of this process."""
        self.load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Open streams, and lines of the access log that are awaited."""
        metrics.siblings.set_function(lambda: len(self._alive()))

    # -- life --------------------------------------------------------------------------------------------------------------

    def _meet(self, index: int, name: int | str) -> Sibling:
        """There is one more, or will be."""
        made = self._siblings[index] = Sibling(index, name, Another(self._router))
        return made

    async def _join(self, asked: Iterable[Sibling]) -> None:
        """Wait for what those who were asked have to tell."""
        self._router.told = self
        if names := [each.name for each in asked]:
            try:
                async with asyncio.timeout(JOIN_S):
                    await self._joined.wait()
            except TimeoutError:
                self._log.warning(f"{self.kind}s_silent", asked=names)

    def settled(self) -> None:
        """The workers are known here: claims of others find them, and what they hold can be told by one who knows it."""
        now_s = self._clock()
        self._settled = True
        for each in self._siblings.values():
            each.another.place_again(now_s)
        teacher = next((each for each in self._alive() if each.settled), None)
        if teacher is not None:
            self._tell_one(teacher, facts.AskIndex())
        else:
            self._taught.set()
        self._look()
        self._beat()

    async def taught(self) -> None:
        """Until what workers hold was told, if there is somebody who knows it; not for ever."""
        try:
            async with asyncio.timeout(TEACH_S):
                await self._taught.wait()
        except TimeoutError:
            self._log.warning(f"{self.kind}s_do_not_teach", blocks=self._router.index.blocks)

    async def run(self) -> None:
        """Keep in touch until cancelled."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self.tick()
        finally:
            self.close()

    def close(self) -> None:
        """Say no more, and hear no more."""
        self._router.told = Told()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self) -> None:
        """Time has passed: who is silent is gone, and who has heard nothing of us does."""
        now_s = self._clock()
        for each in tuple(self._siblings.values()):
            if each.epoch is not None and now_s - each.heard_s > self.silence_s:
                self._gone(each, "silent")
            each.another.place_again(now_s)
        self._beat()
        self._look()

    # -- who there is ------------------------------------------------------------------------------------------------------

    def _alive(self) -> list[Sibling]:
        return [each for each in self._siblings.values() if each.epoch is not None]

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """For `/healthz`."""

    @abstractmethod
    def leads(self) -> bool:
        """Whether this one does what only one of them may."""

    def others_serve(self) -> bool:
        """Whether somebody else knows the workers already."""
        return any(each.settled for each in self._alive())

    def at_rest(self) -> bool:
        """Whether no sibling has an open request."""
        return not any(each.open_streams for each in self._alive())

    def quiet(self) -> bool:
        """Nor waits for a line of the access log, which may come to us."""
        return self.at_rest() and not any(each.awaited_lines for each in self._alive())

    def _say(self, what: str, each: Sibling, **more: object) -> None:
        self._log.warning(f"{self.kind}_{what}", **{self.kind: each.name}, **more)

    def _look(self) -> None:
        """Whether the leader is another one now."""
        leads = self.leads()
        if leads is not self._led:
            self._led = leads
            self._log.info("process_leads" if leads else "process_follows")
            if leads:
                self.on_lead()

    def _gone(self, each: Sibling, why: str) -> None:
        now_s = self._clock()
        claims = each.another.drop(now_s)
        each.epoch, each.settled, each.open_streams, each.awaited_lines = None, False, 0, 0
        each.retell = each.due = False
        each.outbox.clear()
        self._metrics.sibling_messages.inc("gone")
        self._say("gone", each, why=why, claims=claims)
        self._sum_up()
        self._dispatcher.stir()
        self._look()

    def _sum_up(self) -> None:
        """What holds of all of them together."""
        others = self._router.others
        firsts = [each.another.first for each in self._siblings.values()]
        others.first = min((first for first in firsts if first is not None), default=None)
        others.in_flight.clear()
        for each in self._siblings.values():
            for policy, count in each.another.in_flight.items():
                others.in_flight[policy] = others.in_flight.get(policy, 0) + count

    # -- telling -----------------------------------------------------------------------------------------------------------

    def _tell(self, fact: Fact, *, soon: bool = False) -> None:
        """To all that are there. ``soon``: a decision of theirs may hang on it."""
        encoded: msgspec.Raw | None = None
        for each in self._siblings.values():
            if each.epoch is not None and not each.retell:
                if encoded is None:
                    encoded = facts.encode(fact)
                self._add(each, encoded)
        if encoded is not None:
            self._soon(0.0 if soon else _LATER_S)

    def _tell_one(self, each: Sibling, fact: Fact) -> None:
        self._add(each, facts.encode(fact))
        self._soon()

    def _add(self, each: Sibling, encoded: msgspec.Raw) -> None:
        if not each.outbox.add(encoded):
            each.retell = True
            self._metrics.sibling_messages.inc("overflow")
            self._say("does_not_read", each)

    def _soon(self, at_least_s: float = 0.0) -> None:
        if self._timer is not None and at_least_s >= _LATER_S:
            return  # it is under way, or goes along with what is
        now_s = self._clock()
        last_s = max((each.sent_s for each in self._siblings.values()), default=-math.inf)
        due_s = max(now_s + at_least_s, last_s + _GATHER_S)
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Send what there is to send."""
        again_s: float | None = None
        for each in tuple(self._siblings.values()):
            if each.retell and not each.outbox:
                self._tell_claims(each)
            while each.outbox or each.due:
                slow = each.outbox.complete and bool(each.outbox)
                sent = self._send(each)
                if sent is Sent.FULL:
                    again_s = _FULL_S
                    break
                if sent is Sent.AWAY:
                    break
                if slow:
                    again_s = max(again_s or 0.0, _GATHER_S)
                    break
        if again_s is not None:
            self._soon(again_s)

    def _send(self, each: Sibling) -> Sent:
        """One datagram: the next facts, or a mere sign of life."""
        taken = each.outbox.take()
        data = facts.batch(self._header(each), each.outbox.number + 1, taken)
        sent = self._post.send(each.index, data)
        self._metrics.sibling_messages.inc({Sent.YES: "sent", Sent.FULL: "waited", Sent.AWAY: "unsent"}[sent])
        if sent is Sent.YES:
            self._metrics.sibling_facts.inc("sent", by=len(taken))
            each.outbox.number += 1
            each.sent_s, each.due = self._clock(), False
        elif sent is Sent.FULL:
            each.outbox.put_back(taken)
        elif each.epoch is not None:
            self._gone(each, "its socket is closed")
        else:
            each.outbox.clear()
            each.due = False
        return sent

    def _header(self, each: Sibling) -> facts.Header:
        open_streams, awaited_lines = self.load()
        return facts.Header(
            sender=self.index,
            epoch=self.epoch,
            settled=self._settled,
            first=self._router.queue.first(),
            open_streams=open_streams,
            awaited_lines=awaited_lines,
            claims=len(self._numbers) if each.outbox.complete and not each.retell else None,
            clock_s=self._own_clock_s(),
        )

    def _own_clock_s(self) -> float | None:
        """What our clock says, for those who have another one."""
        return None

    def _beat(self) -> None:
        """A sign of life for each, with what there is to tell."""
        self.flush()
        now_s = self._clock()
        for each in self._siblings.values():
            if now_s - each.sent_s >= BEAT_S / 2 and not each.outbox:
                self._send(each)

    def _ask(self, each: Sibling) -> bool:
        """Have it tell its claims again; whether it is there."""
        now_s = self._clock()
        if now_s - each.asked_s < _ASK_AGAIN_S:
            return True
        each.asked_s = now_s
        self._add(each, facts.encode(facts.Ask()))
        sent = self._send(each)
        self._soon(_FULL_S)
        return sent is not Sent.AWAY

    def _tell_claims(self, each: Sibling) -> None:
        each.retell = False
        told: list[Fact] = [facts.Begin()]
        told += [self._claimed(number) for number in self._roles]
        told += [facts.OpenRequests(policy, count) for policy, count in self._open_requests.items()]
        told.append(facts.Complete())
        for fact in told:
            self._add(each, facts.encode(fact))

    def _tell_pairs(self, each: Sibling, address: str | None) -> None:
        """Who has met whom: all, or one worker's."""
        pairs = self._router.costs.pairs
        for endpoint in self._router.pool.endpoints:
            for decode in sorted(pairs.decodes_of(endpoint.address)):
                if address is None or address in (endpoint.address, decode):
                    self._tell_one(each, facts.Met(endpoint.address, decode))

    def _index(self) -> Iterator[msgspec.Raw]:
        """What workers hold, what was used last at the end of each worker's."""
        tokens = float(self._router.settings.block_tokens)
        for endpoint in self._router.pool.endpoints:
            for run in self._router.index.runs(endpoint.address):
                for start in range(0, len(run), facts.MOST_HASHES):
                    piece = run[start : start + facts.MOST_HASHES]
                    yield facts.encode(facts.Learned(endpoint.address, piece.tobytes(), tokens))
        yield facts.encode(facts.IndexTold())

    # -- what the router says ----------------------------------------------------------------------------------------------

    def claimed(self, claim: Claim, role: Role, address: str) -> None:
        """A request has a share in the load of a worker."""
        self._next += 1
        self._numbers[claim] = self._next
        self._roles[self._next] = claim, role, address
        self._tell(self._claimed(self._next), soon=True)

    def _claimed(self, number: int) -> Fact:
        claim, role, address = self._roles[number]
        return facts.Claimed(
            number=number,
            prefill=role is Role.PREFILL,
            address=address,
            tokens=claim.tokens,
            work_s=claim.work_s,
            since_s=claim.since_s,
            late=claim.late,
        )

    def released(self, claim: Claim) -> None:
        """It has no longer."""
        number = self._numbers.pop(claim, None)
        if number is not None:
            del self._roles[number]
            self._tell(facts.Released(number), soon=self._router.others.first is not None)

    def occupied(self, address: str, work_s: float) -> None:
        """A decode worker computes a prompt by itself."""
        self._tell(facts.Occupied(address, work_s))

    def learned(self, address: str, chain: Chain) -> None:
        """A worker holds these blocks."""
        self._tell(facts.Learned(address, facts.hashes_of(chain), chain.block_tokens))

    def corrected(self, address: str, chain: Chain) -> None:
        """It does not."""
        if chain.hashes:
            self._tell(facts.Corrected(address, facts.hashes_of(chain), chain.block_tokens))

    def prefilled(self, address: str, *, sent_s: float, now_s: float, uncached: float, cached: float) -> None:
        """A prefill worker replied."""
        self._tell(facts.Prefilled(address, sent_s, now_s, uncached, cached))

    def judged(self, role: Role, address: str, *, ok: bool) -> None:
        """A request failed on a worker, or went well after others had failed."""
        self._tell(facts.Judged(role is Role.PREFILL, address, ok))

    def handed_over(self, prefill: str, decode: str) -> None:
        """KV went from one to the other."""
        self._tell(facts.HandedOver(prefill, decode))

    def parted(self, prefill: str, decode: str) -> None:
        """A handoff between them could not be used."""
        self._tell(facts.Parted(prefill, decode))

    def met(self, prefill: str, decode: str) -> None:
        """A first handoff between them went well."""
        self._tell(facts.Met(prefill, decode))

    def renewed(self, address: str) -> None:
        """A worker is there, or there again, and counts as not having met anybody: the leader says so, others ask it."""
        self._tell(facts.Renewed(address) if self.leads() else facts.AskPairs(address))

    def new_engine(self, address: str, engine_id: str) -> None:
        """The engine at the address is another one than before."""
        self._tell(facts.NewEngine(address, engine_id[:_MOST_NAME]))

    def reported(self, address: str, load: Load) -> None:
        """A worker was scraped."""
        self._tell(facts.Reported(address, load))

    def at_home(self, session: str, address: str) -> None:
        """A conversation is on a decode worker."""
        if len(session) <= _MOST_NAME:
            self._tell(facts.AtHome(session, address))

    def open_requests(self, policy: str, count: int) -> None:
        """So many requests of a policy that has a limit are open."""
        self._open_requests[policy] = count
        self._tell(facts.OpenRequests(policy, count))

    def waits(self) -> None:
        """A prompt has begun to wait: the header of the next batch says so."""
        for each in self._alive():
            each.due = True
        self._soon()

    # -- what is not of the router -----------------------------------------------------------------------------------------

    def pass_on(self, line: Line) -> bool:
        """A line of the access log that nobody here waits for: to whose request it is, if a sibling is known by that name."""
        each = self._owner(line.key)
        if each is not None:
            self._tell_one(each, facts.LogLine(line))
        return each is not None

    def pass_on_sighting(self, seen: Sighting) -> bool:
        """The same for a stream that was watched."""
        each = self._owner(seen.key)
        if each is not None:
            self._tell_one(each, facts.Watched(seen))
        return each is not None

    def _owner(self, key: str) -> Sibling | None:
        epoch = key.partition("-")[0]
        return next((each for each in self._siblings.values() if each.epoch == epoch), None)

    # -- hearing -----------------------------------------------------------------------------------------------------------

    def take(self, data: bytes, index: int | None = None) -> None:
        """One batch, of the one with this index; None: of whom it says. Whatever it holds, this does not raise."""
        try:
            batch = facts.read(data)
            each = self._siblings[batch.header.sender if index is None else index]
        except (msgspec.DecodeError, KeyError) as error:
            self._metrics.sibling_messages.inc("malformed")
            self._log.error(f"{self.kind}_malformed", why=str(error)[:200], size_bytes=len(data))
            return
        self._metrics.sibling_messages.inc("received")
        self._metrics.sibling_facts.inc("received", by=len(batch.facts))
        now_s = self._clock()
        self._take_header(each, batch, now_s)
        for fact in batch.facts:
            try:
                self._apply(each, fact, now_s)
            except ValueError as error:
                self._metrics.sibling_messages.inc("malformed")
                self._log.error(f"{self.kind}_malformed", why=str(error)[:200], fact=type(fact).__name__)
        told = batch.header.claims
        if each.untold or (told is not None and told != each.another.claims):
            self._ask(each)
        self._sum_up()
        if self._router.others.first is not None and self._timer is not None:
            self._soon()  # they wait for what may be in it
        self._dispatcher.stir()
        self._look()

    def _take_header(self, each: Sibling, batch: Batch, now_s: float) -> None:
        header = batch.header
        if header.epoch != each.epoch:
            # Another life of it, or it was silent: nothing of what it told before holds.
            each.another.drop(now_s)
            if each.epoch is not None:
                self._say("restarted", each)
            else:
                self._log.info(f"{self.kind}_there", **{self.kind: each.name})
            each.epoch, each.asked_s, each.untold = header.epoch, -math.inf, True
        elif batch.number != each.number + 1:
            self._metrics.sibling_messages.inc("missed", by=max(batch.number - each.number - 1, 1))
            self._say("missed", each, after=each.number, got=batch.number)
            each.untold = True
        each.number, each.heard_s, each.settled = batch.number, now_s, header.settled
        each.open_streams, each.awaited_lines = header.open_streams, header.awaited_lines
        first = header.first
        if header.clock_s is not None:
            # Its times become as old here as they were there: what the message took makes them younger by that much.
            each.shift_s = now_s - header.clock_s
            if first is not None:
                first = first._replace(came_s=first.came_s + each.shift_s)
        each.another.first = first

    def _apply(self, each: Sibling, fact: Fact, now_s: float) -> None:
        another, router = each.another, self._router
        costs, pool = router.costs, router.pool
        match fact:
            case facts.Claimed():
                another.claim(
                    fact.number,
                    Role.PREFILL if fact.prefill else Role.DECODE,
                    fact.address,
                    tokens=fact.tokens,
                    work_s=fact.work_s,
                    since_s=fact.since_s + each.shift_s,
                    late=fact.late,
                    now_s=now_s,
                )
            case facts.Released():
                another.release(fact.number, now_s)
            case facts.Learned():
                if fact.hashes and pool.get(fact.address) is not None:
                    router.holds(fact.address, fact.chain(), now_s)
            case facts.Prefilled():
                endpoint = pool.get(fact.address)
                if endpoint is not None:
                    costs.prefilled(
                        endpoint,
                        sent_s=min(fact.sent_s + each.shift_s, now_s),
                        now_s=min(fact.now_s + each.shift_s, now_s),
                        uncached=fact.uncached,
                        cached=fact.cached,
                    )
            case facts.HandedOver():
                costs.handed_over(fact.prefill, fact.decode)
            case facts.Occupied():
                endpoint = pool.get(fact.address)
                if endpoint is not None:
                    endpoint.prefill.occupy(fact.work_s, now_s)
                    router.scales.forget()
            case facts.OpenRequests():
                another.in_flight[fact.policy] = fact.count
            case facts.LogLine():
                self.on_line(fact.line)
            case _:
                self._apply_rare(each, fact, now_s)

    def _apply_rare(self, each: Sibling, fact: Fact, now_s: float) -> None:
        another, router = each.another, self._router
        pairs = router.costs.pairs
        match fact:
            case facts.Reported():
                self._dispatcher.on_load(fact.address, fact.load)
            case facts.Judged():
                another.judged(Role.PREFILL if fact.prefill else Role.DECODE, fact.address, ok=fact.ok, now_s=now_s)
            case facts.Corrected():
                router.index.correct(fact.address, fact.chain(), 0)
            case facts.AtHome():
                router.picker.remember(fact.session, fact.address)
            case facts.Parted():
                pairs.failed(fact.prefill, fact.decode, now_s)
            case facts.Met():
                pairs.succeeded(fact.prefill, fact.decode)
            case facts.Renewed():
                pairs.part(fact.address)
            case facts.NewEngine():
                self._dispatcher.engine_told(fact.address, fact.engine_id)
            case facts.Watched():
                self.on_sighting(fact.sighting)
            case facts.Begin():
                each.untold = False
                another.begin()
            case facts.Complete():
                another.complete(now_s)
                self._joined.set()
            case facts.Ask():
                self._answer(each)
            case facts.IndexTold():
                self._taught.set()
            case facts.AskIndex():
                each.outbox.follow(self._index())
                self._soon()
            case facts.AskPairs():
                if self.leads():
                    self._tell_pairs(each, fact.address)
            case _:
                raise ValueError(f"no rule for {type(fact).__name__}")

    def _answer(self, each: Sibling) -> None:
        """It wants to know everything."""
        self._tell_claims(each)
        self._tell_pairs(each, None)
        self._soon()
