"""Where an instance of a service stands when it is a process: addresses and paths of its container -> those of this machine.

Pure. Every instance has a loopback address of its own, so all ports stay what the compose file says they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.config import Config

_OWN = re.compile(r"(?<![\w.])(?:0\.0\.0\.0|127\.0\.0\.1|localhost)(?![\w.])")


@dataclass(frozen=True)
class Site:
    """How an instance sees the world, and what that is here."""

    address: str
    """Its own: what is meant by 0.0.0.0, 127.0.0.1 and localhost."""
    hosts: Mapping[str, str]
    """Name of another service, or an alias -> address of its first instance."""
    paths: Sequence[tuple[str, str]]
    """Mounted path -> path on this machine."""
    subnets: Sequence[str] = ()
    """Address ranges of the networks: "my own address in there" is its own."""

    def text(self, text: str) -> str:
        """``text`` of a command, an environment or a configuration. A host name is known by the port after it."""
        if paths := dict(self.paths):
            # A longer path before what it lies in.
            targets = "|".join(re.escape(target) for target in sorted(paths, key=len, reverse=True))
            text = re.sub(rf"(?<![\w./-])(?:{targets})(?![\w.-])", lambda match: paths[match[0]], text)
        text = _OWN.sub(self.address, text)
        for subnet in self.subnets:
            text = text.replace(subnet, f"{self.address}/32")
        if self.hosts:
            names = "|".join(re.escape(name) for name in sorted(self.hosts, key=len, reverse=True))
            text = re.sub(rf"(?<![\w.-])(?:{names})(?=:\d)", lambda match: self.hosts[match[0]], text)
        return text

    def tree(self, tree: Any) -> Any:
        """The same for all texts of a tree, its keys apart."""
        if isinstance(tree, dict):
            return {key: self.tree(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.tree(value) for value in tree]
        return self.text(tree) if isinstance(tree, str) else tree


def filter_config(config: Config, *, filter_: Site, envoy: Site, name_server: str) -> Config:
    """The filter's configuration with addresses of this machine: what is Envoy's as Envoy sees it, and workers looked up at
    ``name_server`` (``ip:port``). Raises msgspec.ValidationError, ConfigError."""
    tree = msgspec.to_builtins(config)
    of_envoy = envoy.tree(tree.pop("envoy"))
    # Nobody rolls this out: when it is to stop, it stops.
    tree = {**filter_.tree(tree), "envoy": of_envoy, "drain": {"delay_s": 0, "timeout_s": 2.0}}
    tree["workers"]["dns_servers"] = [name_server]
    return msgspec.convert(tree, Config)


def prometheus_config(tree: Any, site: Site, instances: Mapping[str, Iterable[str]]) -> Any:
    """Prometheus' configuration with addresses of this machine. It cannot be given a name server, so names that it would look
    up are looked up here: ``instances`` has their addresses. Raises ValueError for a kind of look-up other than A records."""
    tree = site.tree(tree)
    for job in tree.get("scrape_configs", []):
        for look_up in job.pop("dns_sd_configs", []):
            if look_up.get("type") != "A":
                raise ValueError(f"job {job.get('job_name')}: dns_sd_configs other than of type A")
            targets = [f"{address}:{look_up['port']}" for name in look_up["names"] for address in instances.get(name, ())]
            job.setdefault("static_configs", []).append({"targets": targets})
    return tree
