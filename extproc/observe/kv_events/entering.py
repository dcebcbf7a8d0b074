"""The events of a batch -> the holdings of an engine, in pieces of a fraction of a millisecond.

What a batch stores goes in before what it removes: an engine may have several blocks of equal content, and counts decide what
is left, not their order. What is said of the GPU's cache before that was emptied does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from extproc.observe.kv_events.events import BlockRemoved, BlockStored, Event, NotABatchError
from extproc.observe.kv_events.plain import enter as enter_at_once
from extproc.routing.engine_holdings import Source
from extproc.routing.stored_blocks import PIECE_BLOCKS, ordering

_FEW_BLOCKS = 64
"""After so few nobody needs a turn."""

_NOWHERE = object()
"""In place of a medium."""

_GPU = 0
_TIERS: dict[str | None, int] = {
    **dict.fromkeys((None, "GPU", "DEVICE", "HBM"), _GPU),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST"), 1),
    **dict.fromkeys(("STORAGE", "DISK", "FS", "CPU_TIER2", "EXTERNAL"), 2),
    "LMCACHE": 3,
}
_ON_GPU = frozenset([medium for medium, tier in _TIERS.items() if tier == _GPU])


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


class Entering:
    """For one engine. ``on_fault`` is called where a batch cannot be understood."""

    def __init__(self, source: Source, counts: Counts, on_fault: Callable[[], None]) -> None:
        self._source = source
        self._counts = counts
        self._on_fault = on_fault
        self.wary = False
        """What was known of slower tiers has proved wrong: when the GPU's cache is emptied, they are not known any more."""

    def batch(self, events: list[Event]) -> Iterator[None]:
        """Enter all of them. Most batches have been entered when this returns."""
        counts = self._counts
        counts.events += len(events)
        try:
            entered = enter_at_once(self._source, events, _ON_GPU)
        except ValueError:
            self._on_fault()
            return iter(())
        if entered is not None:
            counts.stored += entered[0]
            counts.removed += entered[1]
            return iter(())
        batch = _Batch(counts)
        batch.add(events)
        return self._enter(batch)

    def pieces(self, pieces: Iterator[tuple[int, list[Event]]]) -> Iterator[None]:
        """The same for a batch that is decoded on the way."""
        batch = _Batch(self._counts)
        try:
            for told, events in pieces:
                batch.add(events)
                self._counts.events += told
                yield
        except NotABatchError:
            self._on_fault()
            return
        yield from self._enter(batch)

    def _enter(self, batch: _Batch) -> Iterator[None]:
        counts, source = self._counts, self._source
        if batch.cleared:
            yield from source.emptying(everywhere=self.wary)
        stored, since = batch.stored, 0
        try:
            for tier in sorted(stored):  # what is only a hash in a slower tier has its tokens in the GPU's
                events = (yield from ordering(stored[tier])) if tier else stored[tier]
                for blocks in source.entering(events, tier):
                    counts.stored += blocks
                    since += blocks or PIECE_BLOCKS  # of a long event all are told with its first piece
                    if since > _FEW_BLOCKS:
                        yield
                        since = 0
        except (OverflowError, TypeError, ValueError):
            self._on_fault()
            return
        for (tier, group), hashes in batch.removed.items():
            counts.removed += len(hashes)
            for start in range(0, len(hashes), PIECE_BLOCKS):
                source.removed(hashes[start : start + PIECE_BLOCKS], tier, group)
                since += len(hashes)
                if since > _FEW_BLOCKS:
                    yield
                    since = 0


class _Batch:
    """What it says, by tier."""

    __slots__ = ("_counts", "cleared", "removed", "stored")

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.stored: dict[int, list[BlockStored]] = {}
        self.removed: dict[tuple[int, int], list[int | bytes]] = {}
        self.cleared = False

    def add(self, events: list[Event]) -> None:
        """Some of its events."""
        counts, stored, removed = self._counts, self.stored, self.removed
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
                self.cleared = True
                stored.pop(_GPU, None)
                for place in [each for each in removed if each[0] == _GPU]:
                    del removed[place]
                entered_medium = gone_medium = _NOWHERE

    def _tier(self, medium: str | None) -> int | None:
        tier = _TIERS.get(medium)
        if tier is None:
            tier = _TIERS.get(medium.upper()) if medium else _GPU
        if tier is None:
            self._counts.other_tiers += 1
        return tier
