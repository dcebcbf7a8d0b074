"""What processes tell each other: small messages in batches, as msgpack. Data only; what they mean is in :mod:`.siblings`.

They come from processes of the same user and the same program, through a folder that nobody else can enter, or from replicas
that have proved to be some (:mod:`extproc.replicas`). They are checked all the same: a number that is none, or a type that is
another, makes the batch malformed, and it is counted and left.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec

from extproc.observe.log_lines import Line
from extproc.observe.sighting import Sighting
from extproc.routing.load import Load
from extproc.routing.prefix import Chain
from extproc.routing.queue import First

MOST_HASHES = 4_000
"""Blocks of one prompt, or of one piece of an index, in a message: 32 kB. Of a longer prompt its beginning is told."""

_MOST = 1e15
_Number = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_HASHES)]


class _Fact(msgspec.Struct, frozen=True, array_like=True):
    pass


class Claimed(_Fact, frozen=True, array_like=True, tag=1):
    """A request has a share in the load of a worker."""

    number: _Number
    """The process's own number of it."""
    prefill: bool
    """In its role as a prefill worker; else as a decode worker."""
    address: _Name
    tokens: _Number
    work_s: _Seconds
    since_s: _Seconds
    """On the sender's clock: that of the machine, which all processes share (CLOCK_MONOTONIC), or see ``Header.clock_s``."""
    late: bool


class Released(_Fact, frozen=True, array_like=True, tag=2):
    """It has no longer."""

    number: _Number


class Occupied(_Fact, frozen=True, array_like=True, tag=3):
    """A decode worker computes a prompt by itself."""

    address: _Name
    work_s: _Seconds


class Learned(_Fact, frozen=True, array_like=True, tag=4):
    """A worker holds these blocks."""

    address: _Name
    hashes: _Hashes
    block_tokens: Annotated[float, msgspec.Meta(gt=0, le=1e9)]

    def chain(self) -> Chain:
        """As the index wants it. Raises ValueError for bytes that are no hashes."""
        return _chain(self.hashes, self.block_tokens)


class Corrected(_Fact, frozen=True, array_like=True, tag=5):
    """It does not."""

    address: _Name
    hashes: _Hashes
    block_tokens: Annotated[float, msgspec.Meta(gt=0, le=1e9)]

    def chain(self) -> Chain:
        """As the index wants it. Raises ValueError for bytes that are no hashes."""
        return _chain(self.hashes, self.block_tokens)


class Prefilled(_Fact, frozen=True, array_like=True, tag=6):
    """A prefill worker replied."""

    address: _Name
    sent_s: _Seconds
    now_s: _Seconds
    uncached: _Seconds
    cached: _Seconds


class Judged(_Fact, frozen=True, array_like=True, tag=7):
    """A request failed on a worker, or went well after others had failed."""

    prefill: bool
    address: _Name
    ok: bool


class HandedOver(_Fact, frozen=True, array_like=True, tag=8):
    """KV went from one to the other."""

    prefill: _Name
    decode: _Name


class Parted(_Fact, frozen=True, array_like=True, tag=9):
    """A handoff between them could not be used."""

    prefill: _Name
    decode: _Name


class AtHome(_Fact, frozen=True, array_like=True, tag=10):
    """A conversation is on a decode worker."""

    session: _Name
    address: _Name


class OpenRequests(_Fact, frozen=True, array_like=True, tag=11):
    """So many requests of a policy that has a limit are open."""

    policy: _Name
    count: _Number


class Met(_Fact, frozen=True, array_like=True, tag=12):
    """The two have made a handoff before."""

    prefill: _Name
    decode: _Name


class NewEngine(_Fact, frozen=True, array_like=True, tag=13):
    """The engine at the address is another one than before."""

    address: _Name
    engine_id: _Name


class Renewed(_Fact, frozen=True, array_like=True, tag=14):
    """Nobody has met the engine at the address, says the leader."""

    address: _Name


class Reported(_Fact, frozen=True, array_like=True, tag=15):
    """The leader has scraped a worker."""

    address: _Name
    load: Load


class LogLine(_Fact, frozen=True, array_like=True, tag=16):
    """A line of Envoy's access log of a request that the receiver served."""

    line: Line


class Watched(_Fact, frozen=True, array_like=True, tag=17):
    """A stream that was watched for the receiver."""

    sighting: Sighting


class Begin(_Fact, frozen=True, array_like=True, tag=18):
    """All claims and open requests follow."""


class Complete(_Fact, frozen=True, array_like=True, tag=19):
    """That was all of them."""


class Ask(_Fact, frozen=True, array_like=True, tag=20):
    """Tell me all of your claims."""


class AskPairs(_Fact, frozen=True, array_like=True, tag=21):
    """Whom has the worker met, as far as the leader knows?"""

    address: _Name


class AskIndex(_Fact, frozen=True, array_like=True, tag=22):
    """Tell me what workers hold."""


class IndexTold(_Fact, frozen=True, array_like=True, tag=23):
    """That was all that workers hold, as far as the sender knows."""


Fact = (
    Claimed
    | Released
    | Occupied
    | Learned
    | Corrected
    | Prefilled
    | Judged
    | HandedOver
    | Parted
    | AtHome
    | OpenRequests
    | Met
    | NewEngine
    | Renewed
    | Reported
    | LogLine
    | Watched
    | Begin
    | Complete
    | Ask
    | AskPairs
    | AskIndex
    | IndexTold
)


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What holds of the sender as it sends; it comes with every batch."""

    sender: _Number
    epoch: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    """Of this life of the process."""
    settled: bool
    """It knows its workers."""
    first: First | None
    """Of its queue; None: nobody waits."""
    open_streams: _Number
    awaited_lines: _Number
    """Lines of the access log that it waits for."""
    claims: _Number | None
    """How many it has, if the receiver knows all of them with this batch."""
    clock_s: _Seconds | None = None
    """What the sender's clock says as it sends; None: the receiver has the same clock."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One datagram."""

    header: Header
    number: _Number
    """Of the batches from this sender to this receiver, from 1 on."""
    facts: list[Fact]


class _Outgoing(msgspec.Struct, frozen=True, array_like=True):
    header: Header
    number: int
    facts: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode(fact: Fact) -> msgspec.Raw:
    """One fact, once for all siblings."""
    return msgspec.Raw(_encoder.encode(fact))


def batch(header: Header, number: int, facts: list[msgspec.Raw]) -> bytes:
    """A datagram."""
    return _encoder.encode(_Outgoing(header, number, facts))


def read(data: bytes) -> Batch:
    """The same again. Raises msgspec.DecodeError (msgspec.ValidationError is one) for anything else."""
    try:
        return _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def hashes_of(chain: Chain) -> bytes:
    """As much of a chain as one message holds: its beginning."""
    return chain.hashes[:MOST_HASHES].tobytes()


def _chain(hashes: bytes, block_tokens: float) -> Chain:
    found = array("Q")
    found.frombytes(hashes)
    return Chain(found, block_tokens)
