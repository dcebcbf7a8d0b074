"""When a part is ready, and which ports are free: the little of HTTP and sockets that a launcher needs.

Standard library only, and no state but the ports that were given out.
"""

from __future__ import annotations

import http.client
import itertools
import random
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Final

from workers.process import Child, describe_exit


class PartError(RuntimeError):
    """A part has ended or did not become ready; the message has its name and the end of its log."""


def answers(url: str, timeout_s: float = 1.0, own_certificate: tuple[str, str] | None = None) -> bool:
    """Whether ``GET url`` is answered with 200.

    Over HTTPS any certificate is taken: it is a process of ours that is asked, on this machine. ``own_certificate``:
    certificate and key to show, for a server that wants one.
    """
    try:
        context = own_machine(own_certificate) if url.startswith("https:") else None
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as reply:  # noqa: S310  (our own addresses)
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return False


def own_machine(own_certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    """For HTTPS to a process of ours on this machine. Raises OSError where the files cannot be used."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if own_certificate is not None:
        context.load_cert_chain(*own_certificate, password="")
    return context


def check_alive(child: Child) -> None:
    """Raise PartError if it has ended."""
    status = child.poll()
    if status is not None:
        raise PartError(f"{child.name} {describe_exit(status)}; the end of {child.log}:\n{child.tail()}")


def wait_ready(child: Child, url: str, timeout_s: float) -> None:
    """Block until ``url`` answers. Raises PartError when the child ends before, or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not answers(url):
        check_alive(child)
        if time.monotonic() > deadline:
            raise PartError(
                f"{child.name} did not answer {url} within {timeout_s:g} s; the end of {child.log}:\n{child.tail()}"
            )
        time.sleep(0.2)


_GIVEN: Final[deque[int]] = deque(maxlen=6_000)
"""The ports of the last calls of :func:`free_ports`, half of those that there are."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that nothing listens on now, and that this process was not given lately: who has them may listen later.

    Below the range that systems give to outgoing connections: workers take half a minute to listen, time enough
    for one of the many connections of a start-up to sit on a port from that range.
    """
    candidates = random.sample(sorted({*range(20_000, 32_000)} - {*_GIVEN}), 2_000)
    found = list(itertools.islice((port for port in candidates if port_fault(host, port) is None), count))
    if len(found) < count:
        raise OSError(f"{host} has no {count} free ports between 20000 and 32000")
    _GIVEN.extend(found)
    return found


def port_fault(host: str, port: int) -> str | None:
    """Why nothing could listen there now, in the system's words; None if something could."""
    with socket.socket() as listener:
        # As a server would, so that connections that have just closed do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
        return None
