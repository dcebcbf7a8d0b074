"""One connection: it writes a request, reads its answer, and says whether another may follow.

The parser lets empty lines after an answer pass. Anything else there ends the connection.
"""

from __future__ import annotations

import asyncio
import select
from typing import NamedTuple, Protocol, cast

import httptools

from extproc.http1.errors import BrokenError, HttpError, MalformedError, TooLargeError
from extproc.tls.reasons import tls_reason

PIECE_BYTES = 256 << 10
"""A larger body is written in pieces of this size, each when the one before it has left."""

_PIECES_A_TURN = 4
"""How many at most before the event loop has other things done: a fast reader would keep it for the whole body."""

_JOINED_BYTES = 32 << 10
"""Up to here one copy costs less than handing the system two buffers."""

_CLOSED_BY_PEER: int = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere POLLIN says it
_SPEAKS_HTTP = b"HTTP/1."


class Target(NamedTuple):
    """Where a connection goes: ``host`` and ``port``, or the ``path`` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""


class Limits(NamedTuple):
    """What an answer may be."""

    body_bytes: int
    head_bytes: int = 32 << 10
    """Of the status line and all headers, those of interim answers included; and of what may follow without adding to the
    body: extensions of chunks, trailers."""
    fields: int = 128
    """Headers and trailers."""


class Answer(NamedTuple):
    """An answer, whole."""

    status: int
    content_type: bytes | None
    marked: bool
    """It has the header that marks answers of an intermediary."""
    body: bytes


class Reply(Protocol):
    """Who waits for an answer. One of the two is called, once, unless the exchange was cancelled."""

    def answered(self, answer: Answer) -> None:
        """It came."""

    def failed(self, error: HttpError) -> None:
        """It will not."""


class Owner(Protocol):
    """Who keeps connections."""

    def free(self, connection: Connection) -> None:
        """Its answer is read, and another request may follow."""

    def lost(self, connection: Connection) -> None:
        """It is gone."""


class Connection(asyncio.Protocol):
    """A connection to one peer. One request at a time."""

    def __init__(self, owner: Owner, target: Target, limits: Limits, mark: bytes) -> None:
        """``mark`` is the name of the header behind :attr:`Answer.marked`, in lower case."""
        self.target = target
        self.idle_since_s = 0.0
        """The owner's note."""
        self._owner = owner
        self._limits = limits
        self._mark = mark
        self._transport: asyncio.Transport | None = None
        self._poll = select.poll()
        self._parser: httptools.HttpResponseParser
        self._reply: Reply | None = None
        self._unsent: memoryview | None = None
        """What is still to be written of a large body."""
        self._paused = False
        self._encrypted = False
        self._reset()

    def _reset(self) -> None:
        self._begin = b""
        """The first bytes of the answer, until there are enough of them to tell what it is."""
        self._known = False
        """They are those of an answer."""
        self._head_bytes = 0
        self._fields = 0
        self._barren_bytes = 0
        """Read since the body last grew."""
        self._headed = False
        """The final answer's head is read."""
        self._whole = False
        self._more = False
        """Something came after the answer."""
        self._fault: HttpError | None = None
        self._status = 0
        self._content_type: bytes | None = None
        self._marked = False
        self._sized = False
        """A length is stated."""
        self._chunked = False
        self._keep = False
        self._body: list[bytes] = []
        self._body_bytes = 0

    # -- for the pool ------------------------------------------------------------------------------------------------------

    def clean(self) -> bool:
        """Whether an idle connection is open, and nothing was said on it, also as far as the event loop has not looked yet."""
        return self.open and not self._poll.poll(0)

    def send(self, head: bytes, body: bytes, reply: Reply) -> None:
        """Write a request. Only on a connection that has none."""
        transport = self._transport
        if transport is None or transport.is_closing():
            reply.failed(BrokenError("the connection was closed before the request"))
            return
        self._reply = reply
        if len(body) <= _JOINED_BYTES:
            transport.write(head + body)
        elif len(body) <= PIECE_BYTES:
            transport.writelines((head, body))
        else:
            transport.write(head)
            self._unsent = memoryview(body)
            self._write_on()

    @property
    def open(self) -> bool:
        """Whether it is there, as far as the event loop knows."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close it at once; who waits for an answer is told."""
        self._fail(BrokenError("the client was closed"))

    def cancel(self) -> None:
        """Close it at once; what is not written yet is dropped, and nobody is told."""
        self._reply = None
        self._unsent = None
        self._body = []
        if self._transport is not None:
            self._transport.abort()

    # -- of the event loop -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        opened = cast(asyncio.Transport, transport)  # uvloop's are none by descent
        self._transport = opened
        self._encrypted = opened.get_extra_info("sslcontext") is not None
        opened.set_write_buffer_limits(high=PIECE_BYTES)
        self._poll.register(opened.get_extra_info("socket").fileno(), select.POLLIN | _CLOSED_BY_PEER)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone: from the other side, or from ours."""
        self._transport = None
        del self._parser  # it refers to us, and the collector of cycles may not come for long
        self._owner.lost(self)
        why = "closed by the peer" if exc is None else tls_reason(exc) or type(exc).__name__
        if exc is None and self._encrypted and not self._known:
            # TLS 1.3: a server says no to a client's certificate after the client's side of the handshake is over.
            why += "; does it want a certificate of ours that it trusts?"
        self._fail(BrokenError(f"the connection ended {'in' if self._known else 'before'} the answer ({why})"))

    def eof_received(self) -> bool:
        """The peer has said all it will: the end of a body that has no other end."""
        if self._reply is not None and self._headed and not self._sized and not self._chunked:
            self._finish()
        return False

    def pause_writing(self) -> None:
        """The peer reads slower than we write."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        self._write_on()

    def data_received(self, data: bytes) -> None:
        """Some of the answer; or bytes that nobody asked for, after which nothing on this connection can be trusted."""
        if self._reply is None:
            self.cancel()
            return
        try:
            if not self._known and not self._starts(data):
                raise MalformedError("it does not begin like an HTTP/1 answer")
            if self._headed:
                self._feed_body(data)
            else:
                self._feed_head(data)
        except HttpError as error:
            self._fail(error)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._whole:
                self._fail(self._fault or MalformedError(str(error) or type(error).__name__))
                return
            self._more = True  # only what follows the answer is unreadable
        if self._whole:
            self._finish()

    # -- of the parser -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer: ours, interim ones before it, or one too many."""
        if self._whole:
            self._more = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which says nothing of the answer."""
        self._fields += 1
        if self._fields > self._limits.fields:
            self._refuse(MalformedError(f"it has over {self._limits.fields} headers"))
        if self._headed:
            return
        name = name.lower()
        if name == b"content-length":
            self._sized = True
        elif name == b"content-type":
            if self._content_type is None:
                self._content_type = value
        elif name == b"transfer-encoding":
            # RFC 9112, section 6.3: any other coding would have to be undone before anyone can read the body.
            if self._chunked or value.strip().lower() != b"chunked":
                self._refuse(MalformedError("its transfer coding is not chunked"))
            self._chunked = True
        elif name == self._mark and value:
            self._marked = True

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._whole:
            return
        status = self._parser.get_status_code()
        if status >= 200:
            version = self._parser.get_http_version()
            if version not in ("1.1", "1.0"):
                self._refuse(MalformedError(f"it is of HTTP/{version}"))
            self._status = status
            self._headed = True
            if status in (204, 304):
                self._sized = True  # RFC 9112, section 6.3: no body, whatever the headers say
            self._keep = version == "1.1" and self._parser.should_keep_alive()
        else:  # RFC 9110, section 15.2: an interim answer says nothing of the final one
            self._content_type, self._marked, self._sized, self._chunked = None, False, False, False

    def on_body(self, piece: bytes) -> None:
        """Some of the body."""
        if self._whole:
            return
        self._body_bytes += len(piece)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse(TooLargeError(f"over {self._limits.body_bytes} bytes"))
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """The final answer is whole, or an interim one."""
        self._whole = self._headed

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _write_on(self) -> None:
        """Write what is left of a large body, as far as the peer takes it."""
        for _ in range(_PIECES_A_TURN):
            if self._unsent is None or self._paused or self._transport is None or self._transport.is_closing():
                return
            piece, rest = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self._unsent = rest if rest.nbytes else None
            self._transport.write(piece)
        if self._unsent is not None and not self._paused:
            asyncio.get_running_loop().call_soon(self._write_on)

    def _starts(self, data: bytes) -> bool:
        """Whether it still may be an answer. The parser alone would also take other protocols, and empty lines."""
        begin = self._begin + data[: len(_SPEAKS_HTTP) - len(self._begin)]
        self._begin = begin
        self._known = len(begin) == len(_SPEAKS_HTTP)
        return _SPEAKS_HTTP.startswith(begin)

    def _feed_head(self, data: bytes) -> None:
        """As much as may be a head; then the rest, if it was one."""
        allowed = self._limits.head_bytes - self._head_bytes
        self._head_bytes += len(data)
        if len(data) <= allowed:
            self._parser.feed_data(data)
            return
        view = memoryview(data)
        self._parser.feed_data(view[:allowed])
        if not self._headed:
            raise MalformedError(f"its headers are over {self._limits.head_bytes} bytes")
        self._feed_body(view[allowed:])

    def _feed_body(self, data: bytes | memoryview) -> None:
        before = self._body_bytes
        self._parser.feed_data(data)
        if self._body_bytes > before:
            self._barren_bytes = 0
            return
        self._barren_bytes += len(data)
        if self._barren_bytes > self._limits.head_bytes and not self._whole:
            raise MalformedError(f"over {self._limits.head_bytes} bytes of it add nothing to its body")

    def _refuse(self, fault: HttpError) -> None:
        """Stop the parser, inside one of its calls."""
        self._fault = fault
        raise fault

    def _fail(self, error: HttpError) -> None:
        reply = self._reply
        self.cancel()
        if reply is not None:
            reply.failed(error)

    def _finish(self) -> None:
        reply, transport = self._reply, self._transport
        assert reply is not None and transport is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        answer = Answer(self._status, self._content_type, self._marked, body)
        # An answer that came before all of the request was taken leaves a connection on which nobody knows what is what.
        written = self._unsent is None and not transport.get_write_buffer_size()
        if self._whole and self._keep and not self._more and written and not transport.is_closing():
            self._reply = None
            self._reset()
            self._owner.free(self)  # first, so that who is told now may use it for the next one
        else:
            self.cancel()
        reply.answered(answer)
