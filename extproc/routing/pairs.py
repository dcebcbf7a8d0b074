"""What is known about a prefill and a decode worker together: have they met, how fast does KV move, has it gone wrong."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Set

from extproc.routing.rates import TransferRate

_MOST = 100_000
_PENALTY_S = 5.0
_PENALTY_MAX_S = 60.0


class _Pair:
    __slots__ = ("failures", "met", "transfers", "until_s")

    def __init__(self) -> None:
        self.met = False
        self.failures = 0
        self.until_s = 0.0
        self.transfers: TransferRate | None = None


class Pairs:
    """Bounded: of very many pairs, those not used for longest are forgotten."""

    def __init__(self, handshake_s: float) -> None:
        self._handshake_s = handshake_s
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()
        self.known: Callable[[tuple[str, str]], _Pair | None] = self._pairs.get
        """What is known of a prefill and a decode worker, by their addresses, for who asks for very many (see weighing)."""
        self._decodes: dict[str, set[str]] = {}
        self._prefills: dict[str, set[str]] = {}
        self.on_forget: Callable[[str], None] = lambda _address: None
        """Told of an engine that is a new one, or gone."""
        self.changes = 0
        """Grows whenever two have met, or count as not having met any more."""

    def handshake_s(self, prefill: str, decode: str) -> float:
        """What the first transfer of a pair costs beside its bytes; 0 once they have met."""
        return 0.0 if self.met(prefill, decode) else self._handshake_s

    def met(self, prefill: str, decode: str) -> bool:
        """Whether a handoff between them was read, and none has failed since."""
        pair = self._pairs.get((prefill, decode))
        return pair is not None and pair.met

    def decodes_of(self, prefill: str) -> Set[str]:
        """Whom it has met."""
        return self._decodes.get(prefill, frozenset())

    def prefills_of(self, decode: str) -> Set[str]:
        """Whom it has met."""
        return self._prefills.get(decode, frozenset())

    def penalty_s(self, prefill: str, decode: str, now_s: float) -> float:
        """What a pair that failed a while ago is charged: as long as it is not tried again, less every second."""
        pair = self._pairs.get((prefill, decode))
        return max(0.0, pair.until_s - now_s) if pair is not None else 0.0

    def between(self, prefill: str, decode: str, now_s: float) -> tuple[TransferRate | None, float, float]:
        """:meth:`transfer_rate`, :meth:`handshake_s` and :meth:`penalty_s` at once."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return None, self._handshake_s, 0.0
        return pair.transfers, 0.0 if pair.met else self._handshake_s, max(0.0, pair.until_s - now_s)

    def succeeded(self, prefill: str, decode: str) -> None:
        """A handoff between them was read."""
        pair = self._touch(prefill, decode)
        pair.failures, pair.until_s = 0, 0.0
        if not pair.met:
            pair.met = True
            self._decodes.setdefault(prefill, set()).add(decode)
            self._prefills.setdefault(decode, set()).add(prefill)
            self.changes += 1

    def failed(self, prefill: str, decode: str, now_s: float) -> None:
        """The decode worker could not use the handoff. Perhaps one of them is a new engine: they have to meet anew."""
        pair = self._touch(prefill, decode)
        pair.failures += 1
        self._part(prefill, decode)
        pair.until_s = now_s + min(_PENALTY_S * 2 ** (pair.failures - 1), _PENALTY_MAX_S)

    def transferred(self, prefill: str, decode: str, size_bytes: float, seconds: float, first_guess: TransferRate) -> None:
        """The decode worker reported transfers, and all of them came from this prefill worker."""
        pair = self._touch(prefill, decode)
        if pair.transfers is None:
            pair.transfers = first_guess.copy()
        pair.transfers.note(size_bytes, seconds)

    def transfer_rate(self, prefill: str, decode: str) -> TransferRate | None:
        """Between the two; None if that was never seen alone."""
        pair = self._pairs.get((prefill, decode))
        return pair.transfers if pair is not None else None

    def forget(self, address: str) -> None:
        """The engine at ``address`` is a new one."""
        self.forget_all((address,))

    def forget_all(self, addresses: Collection[str]) -> None:
        """The same of several, in one pass over all pairs."""
        gone = frozenset(addresses)
        for key in [key for key in self._pairs if not gone.isdisjoint(key)]:
            self._part(*key)
            del self._pairs[key]
        for address in addresses:
            self.on_forget(address)

    def part(self, address: str) -> None:
        """Perhaps the engine at ``address`` is a new one. What is known of the network to it stays."""
        for decode in tuple(self.decodes_of(address)):
            self._part(address, decode)
        for prefill in tuple(self.prefills_of(address)):
            self._part(prefill, address)

    def _part(self, prefill: str, decode: str) -> None:
        pair = self._pairs[prefill, decode]
        if pair.met:
            pair.met = False
            for of, one, other in ((self._decodes, prefill, decode), (self._prefills, decode, prefill)):
                others = of.get(one, set())
                others.discard(other)
                if not others:
                    of.pop(one, None)
            self.changes += 1

    def _touch(self, prefill: str, decode: str) -> _Pair:
        key = (prefill, decode)
        pair = self._pairs.setdefault(key, _Pair())
        self._pairs.move_to_end(key)
        if len(self._pairs) > _MOST:
            self._part(*next(iter(self._pairs)))
            self._pairs.popitem(last=False)
        return pair
