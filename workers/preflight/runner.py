"""Commands, connections and names: everything a preflight asks that is not a file. Tests put recorded answers in place."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.preflight.facts import Dial


@dataclass(frozen=True)
class Output:
    """What a command said; standard error is part of ``text``."""

    status: int
    text: str


class Runner(Protocol):
    """The world outside of the file tree."""

    def run(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Output | None:
        """Run a command, with ``env`` besides the environment. None: there is no such command, or it took too long."""

    def dial(self, host: str, port: int, *, timeout_s: float) -> Dial:
        """Connect to a TCP port and hang up."""

    def addresses(self, host: str) -> frozenset[str]:
        """The addresses of a name; empty: it has none."""


class SystemRunner:
    """The real one."""

    def run(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Output | None:
        """See Runner. The command and all that it started end with the time-out."""
        if shutil.which(argv[0]) is None:
            return None
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError:
            return None
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        return Output(process.returncode, text.decode(errors="replace"))

    def dial(self, host: str, port: int, *, timeout_s: float) -> Dial:
        """See Runner."""
        target = f"{host}:{port}"
        start = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=timeout_s):
                outcome = "connected"
        except socket.gaierror:
            outcome = "unknown host"
        except TimeoutError:
            outcome = "timed out"
        except ConnectionRefusedError:
            outcome = "refused"
        except OSError as error:
            outcome = error.strerror or str(error)
        return Dial(target=target, outcome=outcome, seconds=time.monotonic() - start)

    def addresses(self, host: str) -> frozenset[str]:
        """See Runner."""
        try:
            return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            return frozenset()
