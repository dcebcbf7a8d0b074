"""Which of several processes this one is, and what that makes of the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from extproc.config import Address, Config


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes under a parent, as the parent tells it."""

    index: int
    """0 to ``count - 1``."""
    count: int
    directory: str
    """Where the sockets between the processes are."""
    lifeline: int
    """Descriptor of the socket to the parent; its end means that the parent is gone."""
    restarts: int = 0
    """How often this one had to be started again."""
    colour: bool = False
    """The parent writes logs to a terminal."""

    @property
    def siblings(self) -> tuple[int, ...]:
        """The others."""
        return tuple(index for index in range(self.count) if index != self.index)

    def socket_of(self, index: int) -> str:
        """Path of the datagram socket of one of the processes."""
        return str(Path(self.directory) / f"{index}.facts")

    def admin_of(self, index: int) -> Address:
        """Where one of the processes other than the first shows its metrics and its state to the first."""
        return Address(path=str(Path(self.directory) / f"{index}.admin"))


def config_of(config: Config, member: Member) -> Config:
    """The configuration of one process: it listens where only it does, and does not repeat what one of them does for all."""
    changes: dict[str, object] = {"listen": str(config.listens[member.index]), "processes": 1}
    if member.index:
        changes["admin"] = str(member.admin_of(member.index))
        changes["cache_servers"] = []  # to be watched by one is enough: no decision depends on them
    return msgspec.structs.replace(config, **changes)
