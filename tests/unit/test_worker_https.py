"""`baton worker` over HTTPS, with the simulated engine: its readiness check follows, and clients need a certificate."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.certificates import Authority, Pair
from workers.ready import answers, free_ports

NAME = "workers.baton.test"
_TIMEOUT_S = 30.0


class Worker:
    """The command, running."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.pair = self.authority.issue("worker", [NAME])
        self.port, side_channel = free_ports(2)
        self.log = directory / "worker.log"
        argv = [sys.executable, "-m", "extproc", "worker", "--engine", "sim", "--profile", "cpu-demo", "--host", "127.0.0.1"]
        argv += ["--role", "decode", "--port", str(self.port), "--side-channel-port", str(side_channel)]
        argv += ["--ssl-certfile", str(self.pair.cert), "--ssl-keyfile", str(self.pair.key)]
        argv += ["--ssl-ca-certs", str(self.authority.ca)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output)

    def until_said(self, pattern: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while re.search(pattern, self.log.read_text()) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def common_name(self, own: Pair | None) -> str:
        """Of the certificate that the worker shows. Raises ssl.SSLError, OSError where it lets nobody in."""
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)
        context.check_hostname = False
        with closing(connection):
            connection.request("GET", "/health")
            shown = connection.sock.getpeercert()
            assert connection.getresponse().status == 200 and shown is not None
        return dict(pair for part in shown["subject"] for pair in part)["commonName"]  # type: ignore[misc]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"))
    yield made
    made.process.terminate()
    made.process.wait(_TIMEOUT_S)


def test_readiness_follows_and_clients_need_a_certificate(worker: Worker) -> None:
    worker.until_said(r"ready after \d+ s")
    assert f"on https://127.0.0.1:{worker.port}" in worker.log.read_text()
    url = f"https://127.0.0.1:{worker.port}/health"
    assert answers(url, own_certificate=(str(worker.pair.cert), str(worker.pair.key)))
    assert not answers(url), "without a certificate"
    assert not answers(f"http://127.0.0.1:{worker.port}/health"), "in plain HTTP"
    assert worker.common_name(worker.authority.issue("client")) == "worker"
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        worker.common_name(None)
    key = worker.pair.key.read_text().splitlines()[1]
    assert key not in worker.log.read_text()


def test_health_command_of_containers_speaks_https_too(worker: Worker) -> None:
    worker.until_said(r"ready after \d+ s")
    url = f"https://127.0.0.1:{worker.port}/health"
    own = {"BATON_SSL_CERTFILE": str(worker.pair.cert), "BATON_SSL_KEYFILE": str(worker.pair.key)}
    for env, status in ((own, 0), ({}, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "workers.health", url],
            env={**os.environ, **env},
            capture_output=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == status, done.stdout


def test_new_certificate_is_served_without_a_restart(worker: Worker) -> None:
    worker.until_said(r"ready after \d+ s")
    client = worker.authority.issue("client")
    worker.authority.issue("worker-2", [NAME], replace=worker.pair)
    deadline = time.monotonic() + _TIMEOUT_S
    while worker.common_name(client) != "worker-2":
        assert time.monotonic() < deadline
        time.sleep(0.1)
