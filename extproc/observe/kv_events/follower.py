"""One publisher: its batches as they are published, and those that it is asked for, in the right order into the holdings.

Numbers alone do not show that an engine was started anew: while we were not connected, the new one may have published as much
as the old one had. So whenever a connection was made anew nothing of the publisher counts, and no batch is taken, until a
replay has shown whose last batch we have (:mod:`extproc.observe.kv_events.sequence`). Without a replay all that was known is
dropped.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import zmq

from extproc.observe.kv_events.addresses import Publisher
from extproc.observe.kv_events.decode import Decoder, time_of
from extproc.observe.kv_events.entering import Counts, Entering
from extproc.observe.kv_events.sequence import Sequence, Step
from extproc.observe.kv_events.sockets import CUT, Socket, Sockets, idle, news, receive
from extproc.routing.holdings import Source

_END = (-1).to_bytes(8, "big", signed=True)

_WAITING_BATCHES = 512
"""ZMQ keeps so many for us (about ten seconds of an engine), then it drops, which shows as a gap."""

_WAITING_REPLAYED = 20_000
"""Twice what vLLM keeps to replay. Its socket drops what we do not take at once."""

_MOST_PAUSE_S = 60.0
"""From one replay that failed to the next, at most."""

_LONGEST_REPLAY_S = 60.0

_SHORT_BYTES = 16 << 10
"""A batch that is no longer is read and entered in one piece of work."""


class State(enum.Enum):
    """Of a follower, for people."""

    CONNECTING = "connecting"
    REPLAY = "replay"
    FOLLOWING = "following"
    NO_REPLAY = "no_replay"
    """What it publishes counts, but it does not answer what it is asked: a batch that is lost will cost all that is known."""
    SILENT = "silent"
    """It does not answer what it is asked: nothing of it counts."""


class _Held(NamedTuple):
    """A batch that waits for the end of a replay."""

    number: int
    time_s: float
    payload: bytes
    gap: bool
    """Others are missing before it. Else it is not sure whose it is."""


class Follower:
    """Made and used on the event loop. ``wake`` is called when :meth:`work` has something to do."""

    def __init__(
        self,
        context: zmq.Context[Any],
        publisher: Publisher,
        source: Source,
        counts: Counts,
        *,
        max_batch_bytes: int,
        replay_timeout_s: float,
        check_interval_s: float,
        wake: Callable[[Follower], None],
        on_lag: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_lag``: seconds from a batch's own time to now, for each that comes live."""
        self.publisher, self.source = publisher, source
        self._counts = counts
        self._replay_timeout_s = replay_timeout_s
        self._check_interval_s = check_interval_s
        self._wake = wake
        self._sockets = Sockets(context, max_message_bytes=max_batch_bytes, wake=partial(wake, self), on_news=self._on_news)
        self._on_lag = on_lag
        self._clock = clock
        self._wall_clock = wall_clock
        self._decoder = Decoder()
        self._entering = Entering(source, counts, self._faulty)
        self._sequence = Sequence()
        self._pieces: Iterator[None] | None = None
        self._held: _Held | None = None
        self._asking = False
        self._shown = False
        """What has come of this replay shows whose it is."""
        self._progress = False
        """Something of it was taken."""
        self._hole: bool = False
        """Something is missing in it: its rest is of no use."""
        self._lost_any = False
        self._unasked = False
        """There may be an answer that nobody waits for any more."""
        self._doubt = False
        """It may be another engine than the one whose batches were taken."""
        self._due = False
        """It has not been asked since that came up."""
        self._news = False
        """Something may have happened to the connection."""
        self._behind_since_s: float | None = None
        """Since then it is being asked, time and again."""
        self._refill: Sequence | None = None
        """While all that there is to replay is asked for anew: where we stood."""
        self._asked_s = self._heard_s = clock()
        self._failures = 0
        self.closed = False
        self.queued = False
        """Whether somebody is about to call :meth:`work`."""
        self._replay: Socket | None = None
        self._subscription, self._monitor = self._sockets.subscribed(
            publisher.events, publisher.topic, waiting=_WAITING_BATCHES
        )
        if publisher.replay is not None:
            self._ask()

    @property
    def unknown(self) -> dict[str, int]:
        """Kinds and fields of events that were not known, and how often."""
        return dict(self._decoder.unknown)

    @property
    def state(self) -> State:
        """What it is doing."""
        if self._failures and self.source.suspect:
            return State.SILENT
        known = self._sequence.next is not None
        if self._asking and (not known or self.source.suspect or self._held is not None or self._progress):
            return State.REPLAY
        if not known or self.source.suspect:
            return State.CONNECTING
        return State.NO_REPLAY if self._failures else State.FOLLOWING

    def close(self) -> None:
        """Give the sockets up."""
        self.closed = True
        self._pieces = None
        self._subscription.disable_monitor()
        self._sockets.drop(self._monitor)
        self._sockets.drop(self._subscription)
        if self._replay is not None:
            self._sockets.drop(self._replay)
            self._replay = None

    def suspect(self) -> None:
        """It may have been started anew. Without a way to ask, nothing that is known of it counts any more."""
        if self._replay is None:
            self._lose()
            self._sequence.forget()
            return
        self.source.suspect = self._doubt = self._due = True
        self._check()

    def start_over(self) -> None:
        """What is known of it has proved wrong: forget it, and ask for all that there is. Whatever it was, what events do not
        say of slower tiers is not taken for granted again, see :attr:`Entering.wary`."""
        self._entering.wary = True
        self._pieces = self._refill = self._held = None
        self._lose()
        self._sequence.forget()
        if self._replay is not None:
            self._new_replay()
            self._ask()

    def tick(self) -> None:
        """Every second or so: a replay may have stalled, and a silent publisher is asked."""
        now_s = self._clock()
        if self._asking:
            stalled = now_s - self._heard_s >= self._replay_timeout_s or now_s - self._asked_s >= _LONGEST_REPLAY_S
            if self._behind_since_s is not None and now_s - self._behind_since_s >= self._replay_timeout_s:
                self.source.suspect = self.source.suspect or self.source.in_step  # more has happened than is known
            if stalled and not self.queued:
                self._replay_failed()
        elif self._replay is not None and (self._due or now_s - self._heard_s >= self._pause_s()):
            self._check()

    def work(self) -> bool:
        """One piece of work, of a fraction of a millisecond; whether there may be more."""
        if self._pieces is not None:
            if next(self._pieces, self) is self:
                self._pieces = None
            return self._is_more()
        if self._asking:
            return self._work_on_replay()
        frames = receive(self._subscription)
        # Asked behind the batch: what it tells of a connection is older than what came over that.
        if frames is not None or self._news:
            self._on_connection()
        if frames is not None:
            self._on_live(frames)
            if self._pieces is not None and len(frames[-1]) <= _SHORT_BYTES and next(self._pieces, self) is self:
                self._pieces = None
            return self._is_more()
        if self._asking or self._replay is None:
            return False
        self._unasked = not idle(self._replay) and receive(self._replay) is not None  # it is not kept
        return self._unasked

    def _is_more(self) -> bool:
        """Whether :meth:`work` has more to do, asked after something was done."""
        return self._pieces is not None or self._asking or self._news or self._unasked or not idle(self._subscription)

    def _on_news(self) -> None:
        self._news = True
        self._wake(self)

    def _on_connection(self) -> None:
        """It broke, or was made anew: then somebody else may be there."""
        self._news = False
        if idle(self._monitor):
            return
        while (what := news(self._monitor)) is not None:
            if self._replay is None:
                if self._sequence.next is not None:
                    self._lose()
                    self._sequence.forget()
                continue
            self.source.suspect = self._doubt = True
            self._due = self._due or what != CUT
        if self._due:
            self._check()

    # -- batches -----------------------------------------------------------------------------------------------------------

    def _on_live(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == 8 else -1
        if number == self._sequence.next and not self._doubt:  # nearly always
            self._counts.live += 1
            self._heard_s = self._clock()
            self.source.suspect = False
            time_s = self._take(Step.NEXT, number, 0.0, frames[2])
            if time_s is not None:
                self._on_lag(max(0.0, self._wall_clock() - time_s))
            return
        time_s = time_of(frames[2]) if number >= 0 else None
        if time_s is None:
            self._faulty()
            return
        if self._doubt:
            self._held = _Held(number, time_s, frames[2], gap=False)
            if not self._asking:
                self._ask()
            return
        step = self._sequence.live(number, time_s)
        if step is Step.OLD:
            self._counts.old += 1
            return
        self._heard_s = self._clock()
        if step is Step.GAP and self._replay is not None:
            self._held = _Held(number, time_s, frames[2], gap=True)
            self._ask()
            return
        if step is Step.RESTART:
            self._restarted()
            if number and self._replay is not None:
                self._ask()
                return
            step = Step.LATE if number else Step.BEGIN
        self._counts.live += 1
        self._on_lag(max(0.0, self._wall_clock() - time_s))
        self._take(step, number, time_s, frames[2])

    def _take(self, step: Step, number: int, time_s: float, payload: bytes) -> float | None:
        """Its time, if it can be understood. ``time_s``: the same, as far as it is known already."""
        if step is Step.BEGIN:
            self.source.cleared()
            self.source.suspect = self._doubt
        elif step is Step.LATE:
            self.source.lost()
        elif step in (Step.GAP, Step.LOST):
            self._counts.gaps_lost += 1
            self._lose()
        batch = self._decoder.quickly(payload)
        if batch is not None:
            self._sequence.took(number, batch.time_s)
            self._pieces = self._entering.batch(batch.events)
            return batch.time_s
        found = time_of(payload)
        self._sequence.took(number, found or time_s or self._sequence.last_time_s)
        if found is None:
            self._faulty()
            return None
        self._pieces = self._entering.pieces(self._decoder.pieces(payload))
        return found

    def _faulty(self) -> None:
        """What it said cannot be understood, and might have been that something is gone."""
        self._counts.faulty += 1
        self._lose()

    def _lose(self) -> None:
        self._counts.dropped += self.source.lost()

    def _restarted(self) -> None:
        self._counts.restarts += 1
        self.source.lost()
        self._sequence.forget()
        self._refill = self._held = None
        self._entering.wary = False

    # -- replays -----------------------------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return min(self._check_interval_s * (1 << min(self._failures, 6)), max(_MOST_PAUSE_S, self._check_interval_s))

    def _check(self) -> None:
        """Ask whether what we have is the last; after a failure, for all that there is."""
        if self._asking or self._pieces is not None:
            return
        if self._failures and not self.source.complete:
            self._refill, self._sequence = self._sequence, Sequence()
        self._ask()

    def _ask(self) -> None:
        if self._replay is None:
            self._new_replay()
        assert self._replay is not None
        self._counts.replays += 1
        self._asking, self._shown, self._progress, self._hole, self._lost_any = True, False, False, False, False
        self._unasked = True
        self._due = False
        self._asked_s = self._heard_s = self._clock()
        if self._behind_since_s is None:
            self._behind_since_s = self._asked_s
        with suppress(zmq.ZMQError):  # nothing comes then, which counts as a failure in its time
            self._replay.send_multipart((b"", self._sequence.ask_from().to_bytes(8, "big")), zmq.NOBLOCK)
        self._wake(self)

    def _work_on_replay(self) -> bool:
        assert self._replay is not None
        frames = receive(self._replay)
        if frames is None:
            if self._news:
                self._on_connection()
            idle(self._subscription)  # what is published waits, but its descriptor must not say so all the time
            return False
        self._heard_s = self._clock()
        # The topic stands before the number since vLLM 0.24; not before, nor in SGLang.
        if len(frames) not in (3, 4) or len(frames[-2]) != 8:
            self._replay_failed()
        elif frames[-2] == _END:
            self._on_end()
        elif not self._hole:
            self._on_replayed(int.from_bytes(frames[-2], "big"), frames[-1])
        return True

    def _on_replayed(self, number: int, payload: bytes) -> None:
        time_s = time_of(payload)
        if time_s is None:
            self._faulty()
            return
        step = self._sequence.replayed(number, time_s, first=not self._shown)
        self._shown = self._shown or self._sequence.shows(number)
        if step is Step.OLD:
            return
        if step is Step.RESTART:
            self._restarted()
            self._new_replay()
            self._ask()
            return
        if step is Step.LOST:
            if self._progress:
                self._hole = True
                return
            self._lost_any = True
        self._refill = None
        self._progress = True
        self._counts.replayed += 1
        self._take(step, number, time_s, payload)

    def _on_end(self) -> None:
        if self._hole:
            self._ask()
            return
        self._asking, self._failures = False, 0
        self._behind_since_s = None
        step = self._sequence.ended(shown=self._shown)
        held, self._held = self._held, None
        self._doubt = self._due
        if step is Step.RESTART:
            self._restarted()
            step = Step.EMPTY
        if step is Step.EMPTY:
            self.source.cleared()
            self._sequence.next = 0
        self._refill = None
        self.source.suspect = self._doubt
        if held is not None:
            again = self._sequence.live(held.number, held.time_s)
            if again in (Step.OLD, Step.RESTART):
                self._counts.gaps_filled += held.gap and not self._lost_any
            else:
                self._counts.live += 1
                self._take(again, held.number, held.time_s, held.payload)
        if self._due:
            self._check()
        self._wake(self)

    def _replay_failed(self) -> None:
        """No answer, or none that can be understood."""
        self._counts.replays_failed += 1
        self._new_replay()
        if self._progress:
            self._ask()  # some of it came: from there on
            return
        self._asking = False
        self._failures += 1
        self._heard_s = self._clock()
        self._behind_since_s = None
        held, self._held = self._held, None
        if held is not None:
            if self._doubt:  # nobody says whose it is
                self._doubt = self._due = False
                self._lose()
                self._sequence.forget()
            self._take(self._sequence.live(held.number, held.time_s), held.number, held.time_s, held.payload)
        elif self._refill is not None:
            self._sequence, self._refill = self._refill, None
        else:
            self.source.suspect = True
        self._wake(self)

    def _new_replay(self) -> None:
        """Another socket: answers to what was asked before must not be taken for answers to what is asked next."""
        assert self.publisher.replay is not None
        if self._replay is not None:
            self._sockets.drop(self._replay)
        self._replay = self._sockets.connected(zmq.DEALER, self.publisher.replay, waiting=_WAITING_REPLAYED)
