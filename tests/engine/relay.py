"""A reverse proxy in front of one worker: it records both bodies of every POST, can change a request and can answer itself."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_NOT_PASSED_ON = frozenset(("connection", "transfer-encoding", "content-length", "host", "date", "server"))


@dataclass
class Exchange:
    """One POST."""

    path: str
    headers: dict[str, str]
    sent: bytes
    reply: bytes = b""
    status: int = 0

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.sent)

    @property
    def answer(self) -> dict[str, Any]:
        return json.loads(self.reply)


@dataclass
class Relay:
    """See the module; one is made by :func:`relay`."""

    worker: str
    """``ip:port``."""
    address: str = ""
    """Its own."""
    exchanges: list[Exchange] = field(default_factory=list)
    rewrite: Callable[[bytes], bytes] | None = None
    """What becomes of a request's body on its way to the worker."""
    fault: tuple[int, bytes] | None = None
    """Status and body with which every POST is answered instead of being passed on; status 0 breaks the connection."""

    def legs(self) -> list[Exchange]:
        """What the filter sent as part of a request, without its releases."""
        return [exchange for exchange in self.exchanges if b"baton-release" not in exchange.sent]


@contextmanager
def relay(worker_url: str) -> Iterator[Relay]:
    record = Relay(worker_url.removeprefix("http://"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, reply = _pass_on(record.worker, "GET", self.path, {}, None)
            self._answer(status, headers, reply)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            exchange = Exchange(self.path, headers, body)
            record.exchanges.append(exchange)
            if record.fault is not None:
                exchange.status, exchange.reply = record.fault
                if exchange.status == 0:
                    self.close_connection = True
                    return
                self._answer(exchange.status, {"content-type": "application/json"}, exchange.reply)
                return
            body = record.rewrite(body) if record.rewrite else body
            exchange.status, reply_headers, exchange.reply = _pass_on(record.worker, "POST", self.path, headers, body)
            self._answer(exchange.status, reply_headers, exchange.reply)

        def _answer(self, status: int, headers: dict[str, str], reply: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    record.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield record
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _pass_on(
    worker: str, method: str, path: str, headers: dict[str, str], body: bytes | None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(worker, timeout=120)
    try:
        connection.request(method, path, body, {k: v for k, v in headers.items() if k not in _NOT_PASSED_ON})
        reply = connection.getresponse()
        kept = {name: value for name, value in reply.getheaders() if name.lower() not in _NOT_PASSED_ON}
        return reply.status, kept, reply.read()
    finally:
        connection.close()
