"""``baton up --topology compose.yaml``: the services of a compose file as processes, without a container engine.

What may live here: from a parsed file to processes and back. Commands, environments, health checks and the order of start are
those of the file; what of it cannot be had without containers is named.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from ruamel.yaml import YAML

from extproc import config as filter_settings
from extproc import topology
from extproc.config import ConfigError
from extproc.parts import (
    POLL_S,
    Part,
    Progress,
    complain,
    leave_folder,
    run_folder,
    signals_ignored,
    signals_raise,
    stay,
)
from extproc.stack import UpError, find_envoy
from extproc.topology import ComposeFile, Healthcheck, Service, TopologyError, seconds
from extproc.topology_env import VariableError, parse_env
from extproc.topology_names import NameServer
from extproc.topology_site import Site, filter_config, prometheus_config
from workers.process import Child
from workers.ready import PartError

_FAILED = 1
_BAD_OPTIONS = 2
_INTERRUPTED = 130

_HOOK_S = 20.0
"""For each command before the end of a service, however long it would take by itself: somebody waits at a terminal."""

MAX_INSTANCES = 16
"""Of one service."""
FILTER_CONFIG = "/etc/baton/baton.yaml"
PROMETHEUS_CONFIG = "/etc/prometheus/prometheus.yml"
_SECRETS = "/run/secrets"

_ENTRYPOINTS: dict[str, list[str]] = {"envoyproxy/envoy": [], "prom/prometheus": ["prometheus"]}
"""What images of others start. Envoy's starts the command as it stands."""
_OPTIONAL = {"prom/prometheus": "prometheus is not installed here", "grafana/grafana": "Grafana is not run as a process"}
"""Images that the others can do without, and why they are left out."""


@dataclass(frozen=True, kw_only=True)
class TopologyOptions:
    """What ``baton up --topology`` is told."""

    file: Path
    profiles: Sequence[str] = ()
    """Empty: those of COMPOSE_PROFILES, in the environment or in .env."""
    scale: Mapping[str, int] = field(default_factory=dict)
    """Service -> instances; one of each that is not named."""
    run_dir: Path | None = None
    once: bool = False
    """Leave when all of it is ready."""
    start_timeout_s: float = 600.0


@dataclass
class _Instance:
    """One process of a service."""

    service_name: str
    service: Service
    name: str
    address: str
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    site: Site | None = None
    part: Part | None = None


def run_topology(options: TopologyOptions, console: Console | None = None) -> int:
    """Bring the services up and stay until Ctrl-C. Returns the exit status; whatever happens, no process is left."""
    console = console or Console(soft_wrap=True)
    try:
        env = environment(options.file)
        file = topology.parse(options.file.read_text(encoding="utf-8"), env, source=str(options.file))
        profiles = options.profiles or [name for name in env.get("COMPOSE_PROFILES", "").split(",") if name]
        if not profiles:
            raise TopologyError(f"which profile? --profile is one of {', '.join(file.profiles)}")
        services = topology.in_use(file, profiles)
        _check_scale(options.scale, services)
    except (TopologyError, VariableError, OSError, UnicodeDecodeError) as error:
        complain(console, str(error))
        return _BAD_OPTIONS
    with signals_raise(), run_folder(options.run_dir) as run_dir:
        status = _Run(options, file, services, run_dir, console).run()
        leave_folder(console, run_dir, temporary=options.run_dir is None, failed=status == _FAILED)
    return status


def environment(file: Path) -> dict[str, str]:
    """The variables that a compose file sees: those of ``.env`` beside it, and over them those of this process.

    Raises VariableError, OSError.
    """
    beside = file.parent / ".env"
    own = parse_env(beside.read_text(encoding="utf-8"), source=str(beside)) if beside.is_file() else {}
    return {**own, **os.environ}


def _check_scale(scale: Mapping[str, int], services: Mapping[str, Service]) -> None:
    for name, count in scale.items():
        if name not in services:
            raise TopologyError(f"--scale {name}: no such service in this profile; there are {', '.join(services)}")
        if not 1 <= count <= MAX_INSTANCES:
            raise TopologyError(f"--scale {name}={count}: between 1 and {MAX_INSTANCES}")


class _Run:
    """One topology, from its first process to the end of its last."""

    def __init__(
        self, options: TopologyOptions, file: ComposeFile, services: dict[str, Service], run_dir: Path, console: Console
    ) -> None:
        self._options = options
        self._file = file
        self._folder = options.file.resolve().parent
        self._run_dir = run_dir
        self._console = console
        self._services = services
        self._instances: list[_Instance] = []
        self._parts: list[Part] = []
        self._names: dict[str, list[str]] = {}
        """Name or alias -> addresses of the instances that have been started: what the name server says."""

    def run(self) -> int:
        up = False
        try:
            base = _free_network()
            self._plan(base)
            with NameServer(f"{base}.1", self._names) as names:
                self._materialise(names.address)
                self._start()
                up = True
                self._describe()
                if not self._options.once:
                    self._console.print("\nUp. Ctrl-C ends it all.")
                    stay(self._parts)
            return 0
        except (UpError, PartError, ConfigError, TopologyError, OSError) as error:
            complain(self._console, str(error))
            return _FAILED
        except KeyboardInterrupt:
            self._console.print("\nStopping …")
            return 0 if up else _INTERRUPTED
        finally:
            signals_ignored()
            self._stop()

    # --- what there will be -------------------------------------------------------------------------------------------

    def _plan(self, base: str) -> None:
        """Give every instance a name and an address, and name what is left out. Raises UpError."""
        left_out: dict[str, str] = {}
        for name, service in self._services.items():
            image = (service.image or "").rpartition(":")[0]
            if image in _OPTIONAL and (image not in _ENTRYPOINTS or shutil.which(_ENTRYPOINTS[image][0]) is None):
                left_out[name] = _OPTIONAL[image]
            elif missing := [other for other in service.depends_on if other in left_out]:
                raise UpError(f"{name} needs {missing[0]}, which is left out: {left_out[missing[0]]}")
        for name, why in left_out.items():
            self._console.print(f"left out: {name} ({why})", highlight=False)
        host = 2
        for name, service in self._services.items():
            if name in left_out:
                continue
            count = self._options.scale.get(name, 1)
            for index in range(count):
                instance = _Instance(name, service, name if count == 1 else f"{name}-{index + 1}", f"{base}.{host}")
                self._instances.append(instance)
                host += 1
        for instance in self._instances:
            for alias in (instance.service_name, *instance.service.aliases):
                self._names.setdefault(alias, [])

    def _materialise(self, name_server: str) -> None:
        """Work out commands and environments, and write the configuration files. Raises UpError, ConfigError, OSError."""
        first: dict[str, str] = {}
        for instance in self._instances:
            for name in (instance.service_name, *instance.service.aliases):
                first.setdefault(name, instance.address)
        for instance in self._instances:
            instance.site = Site(instance.address, first, self._paths(instance), self._file.subnets)
        for instance in self._instances:
            site = self._with_configs(instance, name_server)
            instance.site = site
            argv = [*self._entrypoint(instance), *instance.service.command]
            if not argv:
                raise UpError(f"services.{instance.service_name}: neither entrypoint nor command says what to run")
            instance.argv = _program([site.text(word) for word in argv], f"services.{instance.service_name}")
            instance.env = {key: site.text(value) for key, value in instance.service.environment.items()}

    def _entrypoint(self, instance: _Instance) -> list[str]:
        service = instance.service
        if service.entrypoint is not None:
            return service.entrypoint
        if service.build is not None:
            dockerfile = self._folder / service.build.context / service.build.dockerfile
            try:
                return topology.entrypoint_of(dockerfile.read_text(encoding="utf-8"), service.build.target)
            except ValueError as error:
                raise UpError(f"services.{instance.service_name}.build: {dockerfile}: {error}") from None
        image = (service.image or "").rpartition(":")[0]
        if image not in _ENTRYPOINTS:
            raise UpError(f"services.{instance.service_name}.image: what {service.image} starts is not known here")
        return _ENTRYPOINTS[image]

    def _paths(self, instance: _Instance) -> list[tuple[str, str]]:
        found = []
        for volume in instance.service.volumes:
            source, target = volume.split(":")[:2]
            if source in self._file.volumes:
                path = self._run_dir / "volumes" / source
                path.mkdir(parents=True, exist_ok=True)
            else:
                path = (self._folder / Path(source).expanduser()).resolve()
                if not path.exists():
                    raise UpError(f"services.{instance.service_name}.volumes: {path} does not exist")
            found.append((target, str(path)))
        for target in instance.service.tmpfs:
            # /tmp and its like are there.
            if not Path(target).is_dir():
                raise UpError(f"services.{instance.service_name}.tmpfs: {target} is no folder of this machine")
        for name in instance.service.secrets:
            path = (self._folder / Path(self._file.secrets[name].file).expanduser()).resolve()
            if not path.exists():
                raise UpError(f"secrets.{name}: {path} does not exist")
            found.append((f"{_SECRETS}/{name}", str(path)))
        return found

    def _with_configs(self, instance: _Instance, name_server: str) -> Site:
        """The site with the configuration files that need addresses of this machine in place of those that are mounted."""
        site = instance.site
        assert site is not None
        paths = dict(site.paths)
        written = self._run_dir / f"{instance.name}.yaml"
        if FILTER_CONFIG in paths:
            config = filter_config(
                filter_settings.load(Path(paths[FILTER_CONFIG])),
                filter_=self._site_of("filter"),
                envoy=self._site_of("envoy"),
                name_server=name_server,
            )
            with written.open("w", encoding="utf-8") as file:
                YAML().dump(msgspec.to_builtins(config), file)
            paths[FILTER_CONFIG] = str(written)
        if PROMETHEUS_CONFIG in paths:
            instances: dict[str, list[str]] = {}
            for other in self._instances:
                for name in (other.service_name, *other.service.aliases):
                    instances.setdefault(name, []).append(other.address)
            tree = YAML(typ="safe").load(Path(paths[PROMETHEUS_CONFIG]))
            try:
                tree = prometheus_config(tree, site, instances)
            except ValueError as error:
                raise UpError(f"{paths[PROMETHEUS_CONFIG]}: {error}") from None
            with written.open("w", encoding="utf-8") as file:
                YAML().dump(tree, file)
            paths[PROMETHEUS_CONFIG] = str(written)
        return Site(site.address, site.hosts, list(paths.items()), site.subnets)

    def _site_of(self, service: str) -> Site:
        for instance in self._instances:
            if instance.service_name == service and instance.site is not None:
                return instance.site
        raise UpError(f"there is no service {service}, which the filter's configuration is about")

    # --- up and down --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start each when what it needs is true, until all are ready. Raises PartError, UpError."""
        with Progress(self._console, self._parts, self._options.start_timeout_s) as progress:
            while True:
                for instance in self._instances:
                    if instance.part is None and self._may_start(instance):
                        self._begin(instance)
                if progress.look() and all(instance.part is not None for instance in self._instances):
                    return
                time.sleep(POLL_S)

    def _may_start(self, instance: _Instance) -> bool:
        for name, need in instance.service.depends_on.items():
            for other in (each for each in self._instances if each.service_name == name):
                if other.part is None or (need.condition != "service_started" and other.part.ready_after_s is None):
                    return False
        return True

    def _begin(self, instance: _Instance) -> None:
        child = Child(
            instance.name,
            instance.argv,
            log=self._run_dir / f"{instance.name}.log",
            env=instance.env,
            grace_s=seconds(instance.service.stop_grace_period),
        )
        check = instance.service.healthcheck
        health = None if check is None else Health(instance.name, check, instance.site, instance.env)
        instance.part = Part(child, (lambda: True) if health is None else health, once=self._ends(instance.service_name))
        self._parts.append(instance.part)
        for alias in (instance.service_name, *instance.service.aliases):
            self._names[alias].append(instance.address)

    def _ends(self, name: str) -> bool:
        """Whether it is there to do something and end."""
        needs = [service.depends_on[name] for service in self._services.values() if name in service.depends_on]
        return any(need.condition == "service_completed_successfully" for need in needs)

    def _describe(self) -> None:
        self._console.print()
        for instance in self._instances:
            for port in instance.service.ports:
                inside = port.rpartition(":")[2]
                line = f"{instance.name}: http://{instance.address}:{inside} (published by the file as {port})"
                self._console.print(line, highlight=False)

    def _stop(self) -> None:
        """End all, each before what it needs, as a container engine does. What does not depend on each other ends together."""
        left = [instance for instance in self._instances if instance.part is not None]
        while left:
            needed = {name for instance in left for name in instance.service.depends_on}
            wave = [instance for instance in left if instance.service_name not in needed]
            for instance in wave:
                self._before_stop(instance)
            children = [instance.part.child for instance in wave if instance.part is not None]
            for child in children:
                child.begin_stop()
            for child in children:
                child.stop()
            left = [instance for instance in left if instance not in wave]

    def _before_stop(self, instance: _Instance) -> None:
        """Run what the file wants to be run before SIGTERM. What goes wrong in it does not keep the instance from ending."""
        if instance.site is None or instance.part is None or instance.part.child.poll() is not None:
            return
        for number, hook in enumerate(instance.service.pre_stop):
            log = self._run_dir / f"{instance.name}.pre_stop-{number}.log"
            with suppress(UpError, OSError), log.open("wb") as output:
                argv = _program(
                    [instance.site.text(word) for word in hook.command], f"services.{instance.service_name}.pre_stop"
                )
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run(
                        argv,
                        env={**os.environ, **instance.env},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        timeout=_HOOK_S,
                        check=False,
                    )


class Health:
    """The health check of one instance, run again and again without waiting for it: called, it says whether it is healthy."""

    def __init__(self, name: str, check: Healthcheck, site: Site | None, env: Mapping[str, str]) -> None:
        argv = [word if site is None else site.text(word) for word in check.argv]
        self._argv = _program(argv, f"services.{name}.healthcheck.test")
        self._name = name
        self._check = check
        self._env = {**os.environ, **env}
        self._began_at = time.monotonic()
        self._next_at = self._began_at + seconds(self._check.start_interval if self._starting() else self._check.interval)
        self._failures = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with this object)
        self._kill_at = 0.0

    def __call__(self) -> bool:
        """Whether the check that has just ended said so. Raises PartError after too many failures."""
        now = time.monotonic()
        if self._running is None:
            if now >= self._next_at:
                self._output.seek(0)
                self._output.truncate()
                self._running = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
                self._kill_at = now + seconds(self._check.timeout)
            return False
        status = self._running.poll()
        if status is None and now < self._kill_at:
            return False
        if status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
        self._running = None
        self._next_at = now + seconds(self._check.start_interval if self._starting() else self._check.interval)
        if status == 0:
            return True
        if not self._starting():
            self._failures += 1
        if self._failures >= self._check.retries:
            self._output.seek(0)
            said = self._output.read(4000).decode(errors="replace").strip()
            raise PartError(f"{self._name} is unhealthy: {' '.join(self._argv)}: {said or f'exit status {status}'}")
        return False

    def _starting(self) -> bool:
        return time.monotonic() - self._began_at < seconds(self._check.start_period)


def _program(argv: list[str], where: str) -> list[str]:
    """The command with a program of this machine in it. Raises UpError."""
    name, *arguments = argv
    if name == "baton":
        return [sys.executable, "-m", "extproc", *arguments]
    if name in ("python", "python3"):
        return [sys.executable, *arguments]
    if name == "envoy":
        return [str(find_envoy()), *arguments]
    if (found := shutil.which(name)) is None:
        raise UpError(f"{where}: the program {name} is not installed here")
    return [found, *arguments]


def _free_network() -> str:
    """The first three numbers of a range of loopback addresses that nobody else here is likely to use."""
    return f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"  # noqa: S311  (not a secret)
