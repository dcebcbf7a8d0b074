"""The health check of images without curl, and a worker's own address in a network."""

from __future__ import annotations

import asyncio
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from extproc.config import Epp
from extproc.epp.health import HealthPort
from extproc.transport.choose import Kind
from workers.own_address import own_address
from workers.ready import free_ports


@contextmanager
def server(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"words of the server")

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/health"
        found.shutdown()


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers.health", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (404, 1)])
def test_only_200_is_healthy_and_what_was_said_is_shown(status: int, expected: int) -> None:
    with server(status) as url:
        done = check(url)
    assert (done.returncode, done.stdout) == (expected, f"{status} words of the server\n")


def test_nobody_there_is_unhealthy_and_a_wrong_call_is_neither() -> None:
    done = check(f"http://127.0.0.1:{free_ports(1)[0]}/")
    assert done.returncode == 1
    assert "refused" in done.stdout
    for arguments in ((), ("file:///etc/passwd",), ("http://a", "b")):
        assert check(*arguments).returncode == 2


@contextmanager
def grpc_health(transport: Kind) -> Iterator[str]:
    """What an endpoint picker has at the port where others have their admin port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = free_ports(1)[0]

    async def start() -> HealthPort:
        made = HealthPort(Epp(enabled=True, health_listen=f"127.0.0.1:{port}"), transport)
        await made.start()
        return made

    try:
        made = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
        yield f"http://127.0.0.1:{port}/healthz"
        asyncio.run_coroutine_threadsafe(made.stop(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
@pytest.mark.parametrize("transport", ["lean", "grpc"])
def test_of_several_the_first_that_speaks_http_decides(transport: Kind, status: int, expected: int) -> None:
    with grpc_health(transport) as picker, server(status) as url, server(200) as later:
        done = check(picker, url, later)
    assert (done.returncode, done.stdout) == (expected, f"{status} words of the server\n")


def test_one_that_says_nothing_costs_no_more_than_its_share() -> None:
    """All of them within the 5 s that the images give the check, which is killed then and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, server(200) as url:
        done = check(f"http://127.0.0.1:{silent.getsockname()[1]}/", url)
    assert done.returncode == 0
    nobody, nothing = (f"http://127.0.0.1:{port}/" for port in free_ports(2))
    done = check(nobody, nothing)
    assert done.returncode == 1
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [nobody, nothing]


def test_it_needs_the_standard_library_only() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "workers.health"], capture_output=True, text=True, timeout=30, check=False
    )
    assert "usage" in done.stderr


def test_the_own_address_in_a_network_is_found_and_one_without_is_an_error() -> None:
    assert own_address("127.77.3.9/32") == "127.77.3.9"
    with pytest.raises(ValueError, match=r"203\.0\.113\.0/24: this machine has no "):
        own_address("203.0.113.0/24")
    with pytest.raises(ValueError, match="nonsense"):
        own_address("nonsense")
