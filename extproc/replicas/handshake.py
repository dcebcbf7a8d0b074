"""How two replicas begin: a hello each, then a proof each that the sender knows the secret for these two hellos. Pure."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Annotated, Final, Literal

import msgspec

LOWEST: Final = 1
HIGHEST: Final = 1
"""Versions of :mod:`extproc.processes.facts` as it stands between replicas: to be raised when a reader of the former one would
take it wrongly, or could not read it."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MOST_HELLO_BYTES: Final = 2_048

Refusal = Literal["self", "version", "secret", "certificate", "malformed", "too_many", "timeout"]
"""Why a connection was not taken up."""


class RefusedError(Exception):
    """The other one is not spoken with."""

    def __init__(self, reason: Refusal, why: str) -> None:
        super().__init__(why)
        self.reason: Refusal = reason


class Hello(msgspec.Struct, frozen=True):
    """A map, whose unknown fields are passed over: so much is understood of every version."""

    protocol: Literal["baton-replica"]
    lowest: Annotated[int, msgspec.Meta(ge=0, le=10**6)]
    highest: Annotated[int, msgspec.Meta(ge=0, le=10**6)]
    epoch: Annotated[str, msgspec.Meta(min_length=4, max_length=32, pattern="^[0-9a-z]*$")]
    """Of this life of the filter."""
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    """Of its host, for people."""
    software: Annotated[str, msgspec.Meta(max_length=64)] = ""


def hello(epoch: str, name: str, software: str) -> Hello:
    """Ours."""
    return Hello("baton-replica", LOWEST, HIGHEST, epoch, os.urandom(NONCE_BYTES), name[:64], software[:64])


def encode(said: Hello) -> bytes:
    """For the wire."""
    return msgspec.msgpack.encode(said)


def read(data: bytes) -> Hello:
    """The same again. Raises RefusedError."""
    try:
        found = msgspec.msgpack.decode(data, type=Hello)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RefusedError("malformed", f"it is no replica: {str(error)[:100]}") from None
    if not found.name.isprintable() or not found.software.isprintable():
        raise RefusedError("malformed", "its name is not printable")
    return found


def version(ours: Hello, theirs: Hello) -> int:
    """Which one is spoken. Raises RefusedError."""
    common = min(ours.highest, theirs.highest)
    if common < max(ours.lowest, theirs.lowest):
        raise RefusedError(
            "version",
            f"it speaks versions {theirs.lowest} to {theirs.highest} of the format ({theirs.software or 'unknown'}), "
            f"this one {ours.lowest} to {ours.highest}",
        )
    return common


class Keys(msgspec.Struct, frozen=True):
    """Of one connection, one for each direction."""

    dialer: bytes
    acceptor: bytes


def keys(secret: bytes, dialer_hello: bytes, acceptor_hello: bytes) -> Keys:
    """They depend on every byte that both have said: on nonces, epochs and versions."""
    said = hashlib.sha256(len(dialer_hello).to_bytes(4, "big") + dialer_hello + acceptor_hello).digest()
    return Keys(hmac.digest(secret, b"dialer" + said, "sha256"), hmac.digest(secret, b"acceptor" + said, "sha256"))


def proof(key: bytes) -> bytes:
    """That its sender has the key."""
    return hmac.digest(key, b"proof", "sha256")


def check(key: bytes, said: bytes) -> None:
    """Raises RefusedError."""
    if not hmac.compare_digest(proof(key), said):
        raise RefusedError("secret", "it does not know the secret (replicas.secret_file)")
