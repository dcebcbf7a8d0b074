"""A second front on the workers of the shared system: Envoy and a filter with a configuration of their own."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from extproc.config import Config
from extproc.up import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from tests.engine.metrics import Samples, scrape, until
from workers.process import Child
from workers.ready import answers, free_ports, wait_ready

_READY_S = 30.0


@dataclass(frozen=True)
class Front:
    """A running one. Its counters start at zero and nobody else moves them."""

    url: str
    config: Config
    filter_: Child

    def metrics(self) -> Samples:
        """Of the filter."""
        return scrape(f"http://{self.config.admin}")

    def envoy(self) -> Samples:
        """Of Envoy."""
        return scrape(f"http://{self.config.envoy.admin}", "/stats/prometheus")

    def clients(self) -> float:
        """Connections from clients, as Envoy counts them."""
        return self.envoy().total("envoy_http_downstream_cx_active", envoy_http_conn_manager_prefix="front")

    @contextmanager
    def filter_stopped(self) -> Iterator[None]:
        """The filter stands still: what comes in over its sockets waits there."""
        found = [psutil.Process(pid) for pid in self.filter_.pids()]
        (process,) = [process for process in found if "serve" in process.cmdline() and "-I" not in process.cmdline()]
        with stopped(process):
            yield


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def front(
    prefill: list[str],
    decode: list[str],
    settings: Mapping[str, Mapping[str, Any] | list[Any]] | None = None,
    *,
    ready: bool = True,
) -> Iterator[Front]:
    """Start one in front of workers ``ip:port``. ``settings`` overrides fields of the configuration, by section, or
    all of a list.

    ``ready=False``: the decode workers must be live, the prefill workers need not.
    """
    port, admin, envoy_admin = (f"127.0.0.1:{port}" for port in free_ports(3))
    # Not pytest's own temporary folder: a unix socket's path has at most 107 bytes.
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        base = stack_config(folder, prefill=prefill, decode=decode, listen=port, admin=admin, envoy_admin=envoy_admin)
        tree = msgspec.to_builtins(base)
        tree["warm_up"]["enabled"] = False  # tests count what comes to the workers
        for section, values in (settings or {}).items():
            tree[section] = values if isinstance(values, list) else {**(tree[section] or {}), **values}
        config = msgspec.convert(tree, Config)
        config_file, envoy_file = write_configs(config, folder)
        filter_ = parts.enter_context(Child("filter", filter_command(config_file), log=folder / "filter.log"))
        await_endpoints(config, filter_)
        envoy = parts.enter_context(Child("envoy", envoy_command(find_envoy(), envoy_file), log=folder / "envoy.log"))
        wait_ready(envoy, f"http://{envoy_admin}/ready", _READY_S)
        running = Front(f"http://{port}", config, filter_)
        if ready:
            wait_ready(filter_, f"http://{admin}/healthz", _READY_S)
        else:
            until(lambda: running.metrics().total("baton_endpoint_live", role="decode") == len(decode), _READY_S)
        # Envoy asks the filter's health by itself; before that it answers 503.
        until(lambda: answers(f"{running.url}/health"), _READY_S)
        yield running
