"""One publisher: its two sockets, and what came over them into the holdings, in small pieces.

The sockets are ZMQ's own, not its asyncio ones, which take a future and a callback for every batch: the event loop watches
their file descriptors, and :meth:`Follower.work` reads without waiting. ZMQ's descriptor says only that something may have
happened, until the socket was asked (zmq_getsockopt(3), ZMQ_FD), so it reads until there is nothing.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import zmq

from extproc.observe.kv_events.addresses import Publisher
from extproc.observe.kv_events.decode import BlockRemoved, BlockStored, Decoder, Event, NotABatchError, time_of
from extproc.observe.kv_events.sequence import Sequence, Step
from extproc.routing.holdings import Source
from extproc.routing.stored_blocks import PIECE_BLOCKS, parents_first

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

_END = (-1).to_bytes(8, "big", signed=True)
_NOWHERE = object()
"""In place of a medium."""

_WAITING_BATCHES = 512
"""ZMQ keeps so many for us (about ten seconds of an engine), then it drops, which shows as a gap."""

_WAITING_REPLAYED = 20_000
"""Twice what vLLM keeps to replay. Its socket drops what we do not take at once."""

_MOST_PAUSE_S = 60.0
"""From one replay that failed to the next, at most."""

_LONGEST_REPLAY_S = 60.0

_TIERS: dict[str | None, int] = {
    **dict.fromkeys((None, "GPU", "DEVICE", "HBM"), 0),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST"), 1),
    **dict.fromkeys(("STORAGE", "DISK", "FS", "CPU_TIER2", "EXTERNAL"), 2),
    "LMCACHE": 3,
}


class State(enum.Enum):
    """Of a follower, for people."""

    CONNECTING = "connecting"
    REPLAY = "replay"
    FOLLOWING = "following"
    SILENT = "silent"
    """It does not answer what it is asked: nothing of it counts."""


class Counts:
    """What all followers of one endpoint have counted."""

    def __init__(self) -> None:
        self.stored = self.removed = self.cleared = 0
        """Blocks stored and removed; events that cleared."""
        self.events = 0
        self.live = self.replayed = self.old = self.faulty = 0
        """Batches: taken as published, from a replay, passed over as taken already, not understood."""
        self.gaps_filled = self.gaps_lost = 0
        self.replays = self.replays_failed = 0
        self.restarts = 0
        self.dropped = 0
        """Entries that went because batches were lost."""
        self.other_tiers = 0
        """Events of a medium that is not known."""


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
        self._context = context
        self._counts = counts
        self._max_batch_bytes = max_batch_bytes
        self._replay_timeout_s = replay_timeout_s
        self._check_interval_s = check_interval_s
        self._wake = wake
        self._on_lag = on_lag
        self._clock = clock
        self._wall_clock = wall_clock
        self._decoder = Decoder()
        self._sequence = Sequence()
        self._pieces: Iterator[None] | None = None
        self._held: tuple[int, float, bytes] | None = None
        """The batch behind a gap, while what is missing is asked for."""
        self._asking = False
        self._answered = False
        """Something has come of this replay."""
        self._progress = False
        """Something of it was taken."""
        self._hole: bool = False
        """Something is missing in it: its rest is of no use."""
        self._lost_any = False
        self._due = False
        """Somebody wants to know whether it is still the same engine."""
        self._refill: Sequence | None = None
        """While all that there is to replay is asked for anew: where we stood."""
        self._asked_s = self._heard_s = clock()
        self._failures = 0
        self.closed = False
        self.queued = False
        """Whether somebody is about to call :meth:`work`."""
        self._replay: zmq.Socket[bytes] | None = None
        self._subscription = self._socket(zmq.SUB)
        self._subscription.setsockopt(zmq.SUBSCRIBE, publisher.topic.encode())
        self._subscription.setsockopt(zmq.RCVHWM, _WAITING_BATCHES)
        self._subscription.connect(publisher.events)
        self._watch(self._subscription)
        if publisher.replay is not None:
            self._ask()

    @property
    def unknown(self) -> dict[str, int]:
        """Kinds and fields of events that were not known, and how often."""
        return dict(self._decoder.unknown)

    @property
    def state(self) -> State:
        """What it is doing."""
        if self._failures:
            return State.SILENT
        if self._asking and (self._sequence.next is None or self._held is not None or self._progress):
            return State.REPLAY
        return State.CONNECTING if self._sequence.next is None else State.FOLLOWING

    def close(self) -> None:
        """Give the sockets up."""
        self.closed = True
        self._pieces = None
        self._drop(self._subscription)
        if self._replay is not None:
            self._drop(self._replay)
            self._replay = None

    def suspect(self) -> None:
        """It may have been started anew. Without a way to ask, nothing that is known of it counts any more."""
        if self._replay is None:
            self._lose()
            self._sequence.forget()
            return
        self.source.suspect = self._due = True
        self._check()

    def start_over(self) -> None:
        """What is known of it has proved wrong: forget it, and ask for all that there is."""
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
            if stalled and not self.queued:
                self._replay_failed()
        elif self._replay is not None and (self._due or now_s - self._heard_s >= self._pause_s()):
            self._check()

    def work(self) -> bool:
        """One piece of work, of a fraction of a millisecond; whether there may be more."""
        if self._pieces is not None:
            if next(self._pieces, self) is self:
                self._pieces = None
            return True
        if self._asking:
            return self._work_on_replay()
        frames = self._receive(self._subscription)
        if frames is not None:
            self._on_live(frames)
            return True
        # What nobody asked for is not kept.
        return self._replay is not None and self._receive(self._replay) is not None

    # -- batches -----------------------------------------------------------------------------------------------------------

    def _on_live(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == 8 else -1
        if number == self._sequence.next:  # nearly always
            self._counts.live += 1
            self._heard_s = self._clock()
            self.source.suspect = self._due
            time_s = self._take(Step.NEXT, number, 0.0, frames[2])
            if time_s is not None:
                self._on_lag(max(0.0, self._wall_clock() - time_s))
            return
        time_s = time_of(frames[2]) if number >= 0 else None
        if time_s is None:
            self._faulty()
            return
        step = self._sequence.live(number, time_s)
        if step is Step.OLD:
            self._counts.old += 1
            return
        self._heard_s = self._clock()
        if step is Step.GAP and self._replay is not None:
            self._held = (number, time_s, frames[2])
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
        elif step is Step.LATE:
            self.source.lost()
        elif step in (Step.GAP, Step.LOST):
            self._counts.gaps_lost += 1
            self._lose()
        try:
            batch = self._decoder.decode(payload)
        except NotABatchError:
            self._sequence.took(number, time_s or self._sequence.last_time_s)
            self._faulty()
            return None
        self._sequence.took(number, batch.time_s)
        self._pieces = self._enter(batch.events)
        return batch.time_s

    def _enter(self, events: list[Event]) -> Iterator[None]:
        """Into the holdings; it stops for breath now and then.

        What a batch stores goes in before what it removes: an engine may have several blocks of equal content, and counts
        decide what is left, not their order. What is said before the cache was emptied does not matter.
        """
        counts, source = self._counts, self.source
        counts.events += len(events)
        stored: dict[int, list[BlockStored]] = {}
        removed: dict[tuple[int, int], list[int | bytes]] = {}
        # Nearly always the next event is about the same place as the last of its kind.
        entered: list[BlockStored] = []
        gone: list[int | bytes] = []
        entered_medium: object = _NOWHERE
        gone_medium: object = _NOWHERE
        gone_group: int | None = 0
        for event in events:
            if type(event) is BlockStored:
                if event.medium != entered_medium:
                    tier = self._tier(event.medium)
                    if tier is None:
                        continue
                    entered_medium, entered = event.medium, stored.setdefault(tier, [])
                entered.append(event)
            elif type(event) is BlockRemoved:
                if event.medium != gone_medium or event.group_idx != gone_group:
                    tier = self._tier(event.medium)
                    if tier is None:
                        continue
                    gone_medium, gone_group = event.medium, event.group_idx
                    gone = removed.setdefault((tier, gone_group or 0), [])
                gone += event.block_hashes
            else:
                counts.cleared += 1
                stored.clear()
                removed.clear()
                entered_medium = gone_medium = _NOWHERE
                source.cleared()
        try:
            for tier in sorted(stored):  # what is only a hash in a slower tier has its tokens in the GPU's
                for blocks in source.entering(parents_first(stored[tier]) if tier else stored[tier], tier):
                    counts.stored += blocks
                    yield
        except (OverflowError, TypeError, ValueError):
            self._faulty()
            return
        for (tier, group), hashes in removed.items():
            counts.removed += len(hashes)
            for start in range(0, len(hashes), PIECE_BLOCKS):
                source.removed(hashes[start : start + PIECE_BLOCKS], tier, group)
                yield

    def _tier(self, medium: str | None) -> int | None:
        tier = _TIERS.get(medium)
        if tier is None:
            tier = _TIERS.get(medium.upper()) if medium else 0
        if tier is None:
            self._counts.other_tiers += 1
        return tier

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
        self._asking, self._answered, self._progress, self._hole, self._lost_any = True, False, False, False, False
        self._due = False
        self._asked_s = self._heard_s = self._clock()
        with suppress(zmq.ZMQError):  # nothing comes then, which counts as a failure in its time
            self._replay.send_multipart((b"", self._sequence.ask_from().to_bytes(8, "big")), zmq.NOBLOCK)
        self._wake(self)

    def _work_on_replay(self) -> bool:
        assert self._replay is not None
        frames = self._receive(self._replay)
        if frames is None:
            # What is published waits, but its descriptor must not say so all the time.
            self._subscription.get(zmq.EVENTS)
            return False
        self._heard_s = self._clock()
        if len(frames) != 4 or len(frames[2]) != 8:
            self._replay_failed()
        elif frames[2] == _END:
            self._on_end()
        elif not self._hole:
            self._on_replayed(int.from_bytes(frames[2], "big"), frames[3])
        return True

    def _on_replayed(self, number: int, payload: bytes) -> None:
        time_s = time_of(payload)
        first, self._answered = not self._answered, True
        if time_s is None:
            self._faulty()
            return
        step = self._sequence.replayed(number, time_s, first=first)
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
        step = self._sequence.ended(any_came=self._answered)
        held, self._held = self._held, None
        if step is Step.RESTART:
            self._restarted()
            step = Step.EMPTY
        if step is Step.EMPTY:
            self.source.cleared()
            self._sequence.next = 0
        self._refill = None
        self.source.suspect = self._due
        if held is not None:
            number, time_s, payload = held
            again = self._sequence.live(number, time_s)
            if again in (Step.OLD, Step.RESTART):
                self._counts.gaps_filled += not self._lost_any
            else:
                self._counts.live += 1
                self._take(again, number, time_s, payload)
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
        held, self._held = self._held, None
        if held is not None:
            number, time_s, payload = held
            self._take(self._sequence.live(number, time_s), number, time_s, payload)
        elif self._refill is not None:
            self._sequence, self._refill = self._refill, None
        else:
            self.source.suspect = True
        self._wake(self)

    def _new_replay(self) -> None:
        """Another socket: answers to what was asked before must not be taken for answers to what is asked next."""
        assert self.publisher.replay is not None
        if self._replay is not None:
            self._drop(self._replay)
        self._replay = self._socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVHWM, _WAITING_REPLAYED)
        self._replay.connect(self.publisher.replay)
        self._watch(self._replay)

    # -- sockets -----------------------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_batch_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        asyncio.get_running_loop().add_reader(socket.fileno(), self._wake, self)
        # It may have become readable before it was watched.
        self._wake(self)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        asyncio.get_running_loop().remove_reader(socket.fileno())
        socket.close(0)

    def _receive(self, socket: zmq.Socket[bytes]) -> list[bytes] | None:
        # Asking first is cheaper than the exception that says there is nothing, and constants of ZMQ that are no more than
        # numbers are cheaper than its own.
        if not socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
            return None
        frame = socket.recv(_NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames
