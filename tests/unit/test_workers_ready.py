"""When a part is ready, and which ports are free."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from workers.process import Child
from workers.ready import PartError, answers, free_ports, port_fault, wait_ready

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_part_is_ready_when_its_url_answers_200(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with Child("server", [sys.executable, "-c", SERVER, str(port)], log=tmp_path / "log") as child:
        wait_ready(child, f"http://127.0.0.1:{port}/health", 10)
        assert not answers(f"http://127.0.0.1:{port}/other")
        with pytest.raises(PartError, match=r"server did not answer .* within 0\.3 s"):
            wait_ready(child, f"http://127.0.0.1:{port}/other", 0.3)


def test_a_part_that_ends_before_it_is_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    code = "import sys; print('no such model'); sys.exit(4)"
    with (
        Child("decode-0", [sys.executable, "-c", code], log=tmp_path / "log") as child,
        pytest.raises(PartError, match=r"decode-0 ended with exit status 4[\s\S]*no such model"),
    ):
        wait_ready(child, f"http://127.0.0.1:{free_ports(1)[0]}/health", 10)


def test_a_port_is_not_given_again_while_who_has_it_may_not_listen_yet() -> None:
    given = [port for _ in range(6) for port in free_ports(500)]
    assert len(set(given)) == 3_000


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert [port_fault("127.0.0.1", port) for port in ports] == [None] * 50


def test_a_port_that_something_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert port_fault("127.0.0.1", listener.getsockname()[1]) == "Address already in use"
