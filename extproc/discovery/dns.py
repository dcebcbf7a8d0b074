"""Endpoints behind a DNS name: A and AAAA records with one port, or SRV records.

Every address found counts the same: the priorities and weights of SRV records are ignored, because the filter knows better
than they how busy a worker is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from dns.rdatatype import RdataType

from extproc.discovery.listing import canonical
from extproc.discovery.source import SourceError
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec

MIN_REFRESH_S: Final = 1.0
MAX_ADDRESSES: Final = 1024
"""Of one name; more is an error."""
LOOKUP_TIMEOUT_S: Final = 4.0
"""One question, all name servers and repetitions included."""

_CONCURRENT = 16
_FAMILIES = (RdataType.A, RdataType.AAAA)
_Question = tuple[str, RdataType]
_Found = frozenset[tuple[str, int]]


def resolver(servers: Sequence[tuple[str, int]]) -> dns.asyncresolver.Resolver:
    """A resolver that asks ``servers`` (address, port), or the system's if there are none. Raises SourceError."""
    try:
        found = dns.asyncresolver.Resolver(configure=not servers)
    except dns.resolver.NoResolverConfiguration as error:
        raise SourceError(f"workers.dns: this system names no name server ({error}); workers.dns_servers can") from error
    if servers:
        found.nameservers = [dns.nameserver.Do53Nameserver(address, port) for address, port in servers]
    found.lifetime = LOOKUP_TIMEOUT_S
    return found


class Dns:
    """A source that is a DNS name, in one role.

    A name without records is an answer (scaled to zero). A name that does not exist, a refusal and silence are failures: what
    the name stood for before stays in force.
    """

    kind = "dns"

    def __init__(
        self,
        ask: dns.asyncresolver.Resolver,
        *,
        role: str,
        name: str,
        port: int | None,
        refresh_s: float,
        labels: dict[str, str] | None = None,
    ) -> None:
        """``port`` None: ``name`` has SRV records."""
        self._ask = ask
        self._role = role
        self._name = name
        self._port = port
        self._refresh_s = refresh_s
        self._labels = labels or {}
        self._last: dict[_Question, tuple[Any, ...]] = {}
        self._asked: set[_Question] = set()
        self._ttl_s = refresh_s
        self._slots = asyncio.Semaphore(_CONCURRENT)

    @property
    def name(self) -> str:
        """The name that is looked up."""
        return self._name

    async def look(self) -> EndpointSet:
        """What the name stands for now. Raises SourceError."""
        self._ttl_s, self._asked = self._refresh_s, set()
        found = await (self._service() if self._port is None else self._host(self._name, self._port))
        self._last = {question: answer for question, answer in self._last.items() if question in self._asked}
        if len(found) > MAX_ADDRESSES:
            raise SourceError(f"{self._name}: {len(found)} addresses, more than {MAX_ADDRESSES}")
        # Sorted: name servers turn the order of their answers, and that is no change.
        specs = tuple(EndpointSpec(address=canonical(ip, port), labels=self._labels) for ip, port in sorted(found))
        return EndpointSet(**{self._role: specs})

    async def pause(self) -> None:
        """As long as the answer is good for: its TTL, within bounds."""
        await asyncio.sleep(self.pause_s())

    def pause_s(self) -> float:
        """Seconds until the next look."""
        return min(max(self._ttl_s, MIN_REFRESH_S), self._refresh_s)

    async def _service(self) -> _Found:
        records = await self._records(self._name, RdataType.SRV)
        targets = {(str(record.target), record.port) for record in records}
        targets.discard((".", 0))  # "no such service here" (RFC 2782)
        if len(targets) > MAX_ADDRESSES:
            raise SourceError(f"{self._name}: {len(targets)} targets, more than {MAX_ADDRESSES}")
        answers = await asyncio.gather(*(self._host(target, port) for target, port in targets), return_exceptions=True)
        found: set[tuple[str, int]] = set()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer  # half of the targets is not an answer
            found |= answer
        return frozenset(found)

    async def _host(self, name: str, port: int) -> _Found:
        if port == 0:
            raise SourceError(f"{self._name}: the target {name} has the port 0")
        answers = await asyncio.gather(*(self._records(name, family) for family in _FAMILIES), return_exceptions=True)
        found: list[Any] = []
        failed = 0
        for family, answer in zip(_FAMILIES, answers, strict=True):
            if not isinstance(answer, BaseException):
                found += answer
                continue
            failed += 1
            if not isinstance(answer, SourceError) or failed == len(_FAMILIES):
                raise answer
            # A name server that knows nothing of one address family must not hide the other one.
            found += self._last.get((name, family), ())
        return frozenset((record.address, port) for record in found)

    async def _records(self, name: str, kind: RdataType) -> tuple[Any, ...]:
        """The records of a name; none is an answer, too. Raises SourceError."""
        question = (name, kind)
        self._asked.add(question)
        try:
            async with self._slots:
                answer = await self._ask.resolve(name, kind, raise_on_no_answer=False)
        except (dns.exception.DNSException, OSError) as error:
            why = f"{self._name}: {kind.name} of {name}: {error or type(error).__name__}"
            raise SourceError(why) from error
        if answer.rrset is None:
            self._last[question] = ()
        else:
            self._ttl_s = min(self._ttl_s, float(answer.rrset.ttl))
            self._last[question] = tuple(answer.rrset)
        return self._last[question]
