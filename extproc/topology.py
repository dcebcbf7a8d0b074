"""A compose file, as far as ours uses the Compose specification: text -> typed services. Pure.

A key that is not known here is an error with its line: what is not understood must not look as if it had been heeded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from extproc.topology_env import VariableError, interpolate
from workers import yaml_lines

_DURATION = re.compile(r"(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?(?:(?P<ms>\d+)ms)?")
_ENTRYPOINT = re.compile(r"^ENTRYPOINT\s+(?P<list>\[.*\])\s*$")
_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?\s*$", re.IGNORECASE)

Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]


class TopologyError(ValueError):
    """The compose file cannot be used; the message says where and why."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Build(_Section, frozen=True, kw_only=True):
    """How the image is built. Of it, only the entrypoint in the Dockerfile matters to a process."""

    context: str
    dockerfile: str = "Dockerfile"
    target: str | None = None
    args: Any = None


class Need(_Section, frozen=True, kw_only=True):
    """What must be true of another service before this one starts."""

    condition: Condition = "service_started"
    required: bool = True
    """False: it need not be in a profile that is in use."""


class Healthcheck(_Section, frozen=True, kw_only=True):
    """How it is found out that a service is ready."""

    test: list[str] | str
    """`[CMD, program, …]`, `[CMD-SHELL, line]` or a line for the shell."""
    interval: str = "30s"
    timeout: str = "30s"
    retries: int = 3
    """So many failures in a row, after `start_period`, and it is unhealthy."""
    start_period: str = "0s"
    start_interval: str = "5s"
    """In place of `interval` while `start_period` runs."""

    def __post_init__(self) -> None:
        for name in ("interval", "timeout", "start_period", "start_interval"):
            try:
                seconds(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if isinstance(self.test, list) and (len(self.test) < 2 or self.test[0] not in ("CMD", "CMD-SHELL")):
            raise ValueError("test: a list begins with CMD or CMD-SHELL, and a command follows")

    @property
    def argv(self) -> list[str]:
        """What is run."""
        if isinstance(self.test, str):
            return ["sh", "-c", self.test]
        return ["sh", "-c", *self.test[1:2]] if self.test[0] == "CMD-SHELL" else self.test[1:]


class Attachment(_Section, frozen=True, kw_only=True):
    """A service on a network."""

    aliases: list[str] = []
    """Further names that it has there."""


class Deploy(_Section, frozen=True, kw_only=True):
    """What the service asks of the machine."""

    resources: Any = None


class Hook(_Section, frozen=True, kw_only=True):
    """A command that is run at some point of a service's life."""

    command: list[str]


class Service(_Section, frozen=True, kw_only=True):
    """One service. The fields after `ports` say what a container may do; a process on this machine runs without them."""

    image: str | None = None
    build: Build | None = None
    profiles: list[str] = []
    """In use with any of these; with none of them, always."""
    entrypoint: list[str] | None = None
    command: list[str] = []
    environment: dict[str, str] = {}
    depends_on: dict[str, Need] = {}
    healthcheck: Healthcheck | None = None
    secrets: list[str] = []
    volumes: list[str] = []
    """`source:target` or `source:target:ro`."""
    tmpfs: list[str] = []
    networks: list[str] | dict[str, Attachment] = []
    network_mode: Literal["none"] | None = None
    pre_stop: list[Hook] = []
    """Run one after the other before SIGTERM, as long as they take."""
    stop_grace_period: str = "10s"
    """From SIGTERM to SIGKILL."""
    ports: list[str] = []
    restart: Any = None
    read_only: Any = None
    user: Any = None
    init: Any = None
    cap_add: Any = None
    cap_drop: Any = None
    security_opt: Any = None
    ipc: Any = None
    pid: Any = None
    shm_size: Any = None
    ulimits: Any = None
    devices: Any = None
    deploy: Deploy | None = None

    def __post_init__(self) -> None:
        try:
            seconds(self.stop_grace_period)
        except ValueError as error:
            raise ValueError(f"stop_grace_period: {error}") from None
        for volume in self.volumes:
            if len(parts := volume.split(":")) not in (2, 3) or not parts[1].startswith("/"):
                raise ValueError(f"volumes: {volume!r} is not source:target or source:target:ro")

    @property
    def aliases(self) -> set[str]:
        """Names that it has on its networks beside its own."""
        if isinstance(self.networks, list):
            return set()
        return {alias for attachment in self.networks.values() for alias in attachment.aliases}


class Secret(_Section, frozen=True, kw_only=True):
    """A file that a service finds in /run/secrets."""

    file: str


class ComposeFile(_Section, frozen=True, kw_only=True):
    """The whole file. What begins with `x-` is left out."""

    name: str = "topology"
    services: dict[str, Service]
    networks: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
    secrets: dict[str, Secret] = {}

    def __post_init__(self) -> None:
        for name, service in self.services.items():
            where = f"services.{name}"
            for other in service.depends_on:
                if other not in self.services:
                    raise ValueError(f"{where}.depends_on.{other}: there is no such service")
            for secret in service.secrets:
                if secret not in self.secrets:
                    raise ValueError(f"{where}.secrets: {secret} is not one of the secrets of this file")
            for network in service.networks:
                if network not in self.networks:
                    raise ValueError(f"{where}.networks: {network} is not one of the networks of this file")
            for volume in service.volumes:
                source = volume.split(":")[0]
                if not source.startswith(("/", ".", "~")) and source not in self.volumes:
                    raise ValueError(f"{where}.volumes: {source} is neither a path nor one of the volumes of this file")

    @property
    def profiles(self) -> list[str]:
        """All that are named."""
        return sorted({profile for service in self.services.values() for profile in service.profiles})

    @property
    def subnets(self) -> list[str]:
        """Address ranges of its networks, where they are given."""
        return [
            block["subnet"]
            for network in self.networks.values()
            if isinstance(network, dict)
            for block in network.get("ipam", {}).get("config", [])
        ]


def parse(text: str, env: Mapping[str, str], *, source: str = "compose.yaml") -> ComposeFile:
    """The file with its variables replaced. Raises TopologyError: ``source:line: field: why``."""

    def edit(tree: Any) -> object:
        if not isinstance(tree, dict):
            return tree
        return interpolate({key: value for key, value in tree.items() if not str(key).startswith("x-")}, env)

    try:
        return yaml_lines.decode(text, ComposeFile, source=source, edit=edit)
    except VariableError as error:
        line = yaml_lines.line_of(text, error.steps)
        raise TopologyError(f"{source}:{line}: {error}") from None
    except yaml_lines.FaultError as error:
        raise TopologyError(str(error)) from None


def in_use(file: ComposeFile, profiles: Iterable[str]) -> dict[str, Service]:
    """The services of these profiles and those without one, each after all that it needs. Raises TopologyError."""
    wanted = set(profiles)
    if unknown := wanted - set(file.profiles):
        raise TopologyError(f"there is no profile {sorted(unknown)[0]}; there are {', '.join(file.profiles)}")
    chosen = {
        name: service for name, service in file.services.items() if not service.profiles or wanted & set(service.profiles)
    }
    ordered: dict[str, Service] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in ordered:
            return
        if name in path:
            raise TopologyError(f"services.{name}.depends_on: in a circle: {' -> '.join((*path, name))}")
        for other, need in chosen[name].depends_on.items():
            if other in chosen:
                if need.condition == "service_healthy" and chosen[other].healthcheck is None:
                    raise TopologyError(f"services.{name}.depends_on.{other}: it has no healthcheck")
                add(other, (*path, name))
            elif need.required:
                raise TopologyError(f"services.{name}.depends_on.{other}: not in the profiles in use")
        ordered[name] = chosen[name]

    for name in chosen:
        add(name, ())
    return ordered


def seconds(text: str) -> float:
    """``"1m30s"`` -> 90.0. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text!r} is not a duration such as 1m30s")
    hours, minutes, whole, millis = (float(match[unit] or 0) for unit in ("h", "m", "s", "ms"))
    return hours * 3600 + minutes * 60 + whole + millis / 1000


def entrypoint_of(dockerfile: str, target: str | None) -> list[str]:
    """The ENTRYPOINT of a stage of a Dockerfile (the last one if ``target`` is None), or of the stage that it is made from.

    Raises ValueError if there is no such stage.
    """
    found: dict[str, list[str]] = {}
    stage = ""
    for line in dockerfile.splitlines():
        if start := _FROM.match(line):
            stage = start["name"] or str(len(found))
            found[stage] = found.get(start["base"], [])
        elif entry := _ENTRYPOINT.match(line):
            found[stage] = msgspec.json.decode(entry["list"], type=list[str])
    name = stage if target is None else target
    if name not in found:
        raise ValueError(f"there is no stage {name}")
    return found[name]
