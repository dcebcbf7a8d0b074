"""What the configuration says of replicas. Pure: no I/O."""

from __future__ import annotations

import msgspec


class ReplicaTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Certificates between replicas; both sides show theirs. Files are PEM, and are read again when they change."""

    ca_file: str
    """Certificates of the authorities that the certificates of replicas come from."""
    cert_file: str
    """Our own, with its chain."""
    key_file: str
    """Its key, without a password. Readable by this process only."""
    names: list[str] = []
    """A replica's certificate must hold one of these (subjectAltName: a DNS name or a URI). None: any certificate of `ca_file`
    will do, so that must be an authority for replicas alone, unless there is a `secret_file` too."""


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Several filters of the same workers on different hosts, which tell each other what they do. Off without `listen`. See
    [operations](operations.md#more-than-one-filter)."""

    listen: str | None = None
    """`host:port` for the others, such as `0.0.0.0:9005`. null: this filter knows of no other."""
    peers: list[str] = []
    """`host:port` of the others. The same list may be given to all: an address that leads to this filter itself is left out."""
    dns: str | None = None
    """Name whose A and AAAA records are all of them, itself included: of a headless Service, say. `workers.dns_servers` are
    asked."""
    port: int | None = None
    """Port of those. null: that of `listen`."""
    refresh_s: float = 5.0
    """Longest time between two look-ups of `dns`."""
    tls: ReplicaTls | None = None
    """mTLS between them. null: only with `plaintext: true`."""
    secret_file: str | None = None
    """File with a secret that all of them have, of 16 bytes at least. Nobody without it is listened to, and no message can be
    changed on its way. Needed without `tls`."""
    plaintext: bool = False
    """Anybody on the way may read what they say: addresses of workers, hashes of prompts, names of policies and conversations,
    but no prompt."""
    silence_s: float = 2.0
    """A replica that was not heard for so long has no share in the ledger."""
    max_bytes_per_s: int = 16 << 20
    """To each of the others. What is above it waits; who is 8 MiB behind is told everything again."""


def faults(settings: ReplicaSettings) -> str | None:
    """Why these settings cannot be meant, with the field named; None: they can. Addresses are not looked at."""
    if settings.listen is None:
        named = [name for name in ("peers", "dns", "tls", "secret_file") if getattr(settings, name)]
        return f"listen: {named[0]} is given, but not where the others reach this one" if named else None
    if not settings.peers and settings.dns is None:
        return "peers: who are the others? (or dns)"
    if settings.dns == "" or len(settings.dns or "") > 253:
        return "dns: not a name"
    if len(settings.peers) > MOST_REPLICAS:
        return f"peers: {len(settings.peers)} are more than {MOST_REPLICAS}"
    if settings.port is not None and not 0 < settings.port < 65536:
        return f"port: {settings.port} is not 1 to 65535"
    if settings.tls is None and not settings.plaintext:
        return "tls: is needed (or plaintext: true and a secret_file, in a network of your own)"
    if settings.tls is not None and settings.plaintext:
        return "plaintext: contradicts tls"
    if settings.tls is None and not settings.secret_file:
        return "secret_file: is needed without tls, or anybody could say that a worker is full"
    if settings.tls is not None:
        for name in ("ca_file", "cert_file", "key_file"):
            if not getattr(settings.tls, name):
                return f"tls.{name}: an empty path"
    if not 1 <= settings.refresh_s < 1e6:
        return f"refresh_s: {settings.refresh_s:g} is below 1 s, or endless"
    if not 1 <= settings.silence_s <= 60:
        return f"silence_s: {settings.silence_s:g} is not 1 to 60: signs of life come four times a second"
    if settings.max_bytes_per_s < 1 << 16:
        return f"max_bytes_per_s: {settings.max_bytes_per_s} is below 65536"
    return None


MOST_REPLICAS = 16
"""Each applies what all others do, so many would do little else."""
