"""A name server for the services of a topology, as a container engine has one: a name, or an alias -> all that run under it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.rdatatype import RdataType

_TTL_S = 1
_MESSAGE_BYTES = 4096


class NameServer:
    """A records over UDP on a loopback address, from a thread. A name that is not known does not exist; one without instances
    has no records."""

    def __init__(self, address: str, names: Mapping[str, Sequence[str]]) -> None:
        """``names``: looked at for every question, so it may change meanwhile. Raises OSError."""
        self._names = names
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        """``ip:port``"""
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                packet, client = self._socket.recvfrom(_MESSAGE_BYTES)
                self._socket.sendto(self.answer(packet), client)
            except dns.exception.DNSException:
                continue  # not a question
            except OSError:
                return  # closed

    def answer(self, packet: bytes) -> bytes:
        """The reply to a question. Raises DNSException for what is none."""
        question = dns.message.from_wire(packet)
        reply = dns.message.make_response(question)
        reply.flags |= dns.flags.AA | dns.flags.RA
        asked = question.question[0] if question.question else None
        name = "" if asked is None else asked.name.to_text(omit_final_dot=True).lower()
        if asked is None or name not in self._names:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif asked.rdtype == RdataType.A and (found := self._names[name]):
            reply.answer.append(dns.rrset.from_text_list(asked.name, _TTL_S, "IN", "A", list(found)))
        return reply.to_wire()
