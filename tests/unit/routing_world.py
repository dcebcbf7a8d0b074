"""Builders for tests of the decision: a pool, prompts, and a router with a clock that tests move."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any
from zlib import crc32

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.load import Load
from extproc.routing.pool import Endpoint, Pool
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import State, Ticket

BLOCK_TOKENS = 64


def specs(letter: str, count: int, **fields: Any) -> tuple[EndpointSpec, ...]:
    """``p0``, ``p1`` and so on: an address is just a name here."""
    return tuple(EndpointSpec(address=f"{letter}{number}", **fields) for number in range(count))


def pool_of(
    prefill: int | Iterable[EndpointSpec] = 2, decode: int | Iterable[EndpointSpec] = 2, both: int | Iterable[EndpointSpec] = 0
) -> Pool:
    """All of them live. Counts, or their specs."""

    def some(letter: str, what: int | Iterable[EndpointSpec]) -> tuple[EndpointSpec, ...]:
        return specs(letter, what) if isinstance(what, int) else tuple(what)

    pool = Pool(EndpointSet(prefill=some("p", prefill), decode=some("d", decode), both=some("b", both)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    return pool


def chain(text: str | int, tokens: int) -> Chain:
    """Of a prompt of ``tokens``. Prompts with the same text share as many blocks as the shorter one has."""
    name = crc32(str(text).encode())
    return Chain(array("Q", (name << 32 | block for block in range(tokens // BLOCK_TOKENS))), float(BLOCK_TOKENS))


def tailed(text: str | int, shared_tokens: int, tail: str | int, tokens: int) -> Chain:
    """Of a prompt that begins like others with ``text``, for ``shared_tokens``, and then goes its own way."""
    head, own = chain(text, shared_tokens).hashes, chain(tail, tokens).hashes
    return Chain(head + own[len(head) :], float(BLOCK_TOKENS))


class World:
    """A router and its clock."""

    def __init__(self, pool: Pool | None = None, **settings: Any) -> None:
        self.pool = pool if pool is not None else pool_of()
        self.router = Router(self.pool, Routing(**settings))
        self.now_s = 100.0
        self._prompts = 0

    def __getitem__(self, address: str) -> Endpoint:
        endpoint = self.pool.get(address)
        assert endpoint is not None
        return endpoint

    def job(self, tokens: int = 4000, text: str | int | None = None, **fields: Any) -> Job:
        """A prompt; what is no field of Job is one of Aims. Without ``text`` it shares nothing with any other."""
        self._prompts += 1
        own = {name: fields.pop(name) for name in tuple(fields) if name in Job.__struct_fields__}
        return Job(
            model=own.pop("model", None),
            chain=own.pop("chain", chain(text if text is not None else f"prompt {self._prompts}", tokens)),
            tokens=tokens,
            aims=own.pop("aims", None) or Aims(**fields),
            arrived_s=own.pop("arrived_s", self.now_s),
            deadline_s=own.pop("deadline_s", self.now_s + 600),
            **own,
        )

    def submit(self, tokens: int = 4000, text: str | int | None = None, **fields: Any) -> Ticket:
        return self.router.submit(self.job(tokens, text, **fields), self.now_s)

    def apart(self, tokens: int = 4000, text: str | int | None = None, **fields: Any) -> Ticket:
        """One that is handed over in any case."""
        return self.submit(tokens, text, mode=Mode.DISAGGREGATE, **fields)

    def whole(self, tokens: int = 4000, text: str | int | None = None, **fields: Any) -> Ticket:
        """One that a decode worker does in any case."""
        return self.submit(tokens, text, mode=Mode.AGGREGATE, **fields)

    def warm(self, address: str, text: str | int, tokens: int) -> None:
        """The worker holds so much of the prompt."""
        self.router.index.insert(address, chain(text, tokens))

    def reports(self, address: str, **load: Any) -> None:
        self.router.on_load(address, Load(**load), self.now_s)

    def wait(self, seconds: float) -> list[Ticket]:
        """Time passes, all at once; what was decided."""
        self.now_s += seconds
        return self.poll()

    def poll(self) -> list[Ticket]:
        return self.router.poll(self.now_s)

    def prefilled(self, ticket: Ticket, **reply: Any) -> list[Ticket]:
        """Its prefill worker replied; who goes next."""
        self.router.prefill_done(ticket, self.now_s, **reply)
        return self.poll()

    def finish(self, *tickets: Ticket) -> list[Ticket]:
        for ticket in tickets:
            self.router.finish(ticket, self.now_s)
        return self.poll()

    def assert_empty(self) -> None:
        """Nothing is in flight, nothing waits, and nothing is remembered of what did."""
        for endpoint in self.pool.endpoints:
            for leg in (endpoint.prefill, endpoint.decode):
                assert (leg.requests, leg.tokens, dict(leg.claims)) == (0, 0, {}), endpoint.address
        router = self.router
        assert (len(router.queue), router.queue.bytes, router.queue.queued_s) == (0, 0, 0.0)
        assert (router._heads, router._in_flight, router._tickets, router._impatient) == ({}, {}, {}, 0)


def prefills(tickets: Iterable[Ticket]) -> list[str | None]:
    """Where they are computed; None: by the decode worker, or not yet placed."""
    return [ticket.prefill.address if ticket.prefill is not None else None for ticket in tickets]


def decodes(tickets: Iterable[Ticket]) -> list[str | None]:
    return [ticket.decode.address if ticket.decode is not None else None for ticket in tickets]


def placed(ticket: Ticket) -> bool:
    return ticket.state is State.PLACED
