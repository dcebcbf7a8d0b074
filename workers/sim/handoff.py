"""The giving side of a handoff: blocks pinned for another worker, their lease, and how they come free.

Mostly that is a prefill worker. A decode worker with ``bidirectional_kv_xfer`` pins those of its answer for the next prefill.

A handoff ends once: by a read, by a release, or by the end of its lease. What comes after that gets whatever the blocks hold
by then, never an error, as with a one-sided memory read. Stricter than real memory in one point: a block whose handoff is over
reads as wrong at once, where real memory stays right until the block is written again. No I/O here, time is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.sim.blocks import BlockPool, Kv

_REMEMBERED = 100_000
"""Handoffs that are over and still known by name."""

_AFTER = {"read": "second_use", "released": "use_after_release", "expired": "use_after_expiry"}


@dataclass
class Pinned:
    """One handoff that waits for its decode worker."""

    request_id: str
    blocks: list[int]
    expires_s: float
    wanted: bool = False
    """A decode worker asked for it: a heartbeat came."""
    reply_lost: bool = field(default=False)
    """The prefill's HTTP reply could not be delivered, so nobody can know of it."""
    turn: bool = False
    """They are a decode worker's, of an answer: whether anybody comes for them is up to the client."""


class Read(NamedTuple):
    """What a decode worker gets for a read."""

    kv: list[Kv]
    wrong: str | None
    """The kind of violation, None for a correct read."""
    late: bool
    """The notification came after the blocks had been freed."""


class Handoffs:
    """All handoffs of one prefill worker."""

    def __init__(self, pool: BlockPool, *, lease_s: float) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self.pinned: dict[str, Pinned] = {}
        self._over: OrderedDict[str, str] = OrderedDict()

    def pin(self, request_id: str, blocks: list[int], now_s: float) -> None:
        """Keep the blocks of a finished prefill; the pool's users are taken over from the request."""
        self.pinned[request_id] = Pinned(request_id, blocks, now_s + self._lease_s)

    def pin_turn(self, request_id: str, blocks: list[int], now_s: float, ttl_s: float) -> None:
        """Keep those of an answer, for so long and no longer."""
        self.pinned[request_id] = Pinned(request_id, blocks, now_s + ttl_s, turn=True)

    def heartbeat(self, request_ids: Sequence[str], now_s: float) -> None:
        """A decode worker still wants these: two thirds of a lease more from now, never less than there was."""
        for request_id in request_ids:
            if pinned := self.pinned.get(request_id):
                pinned.wanted = True
                pinned.expires_s = max(pinned.expires_s, now_s + self._lease_s * 2 / 3)

    def read(self, request_id: str, blocks: Sequence[int]) -> Read:
        """What the blocks hold, and the end of the handoff."""
        pinned = self.pinned.get(request_id)
        if pinned is None:
            over = self._over.get(request_id)
            wrong = _AFTER[over] if over else "unknown_request"
            return Read([self._spoilt(block) for block in blocks], wrong, over is not None)
        own = set(pinned.blocks)
        foreign = [block for block in blocks if block not in own]
        kv = [self._spoilt(block) if block not in own else self._pool.kv[block] for block in blocks]
        self._end(request_id, "read")
        return Read(kv, "foreign_blocks" if foreign else None, False)

    def release(self, request_id: str) -> bool:
        """Give the blocks back unread; False if there was nothing to give back."""
        if request_id not in self.pinned:
            return False
        self._end(request_id, "released")
        return True

    def expire(self, now_s: float) -> list[Pinned]:
        """Free what nobody fetched in time."""
        over = [pinned for pinned in self.pinned.values() if pinned.expires_s <= now_s]
        for pinned in over:
            self._end(pinned.request_id, "expired")
        return over

    def _end(self, request_id: str, how: str) -> None:
        self._pool.drop(self.pinned.pop(request_id).blocks)
        self._over[request_id] = how
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _spoilt(self, block: int) -> Kv:
        held = self._pool.kv[block] if 0 < block < self._pool.num_blocks else Kv(b"", b"")
        return Kv(b"stale", held.tokens)
