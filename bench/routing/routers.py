"""What stands between the clients and the engines: Envoy with the filter, or a peer in their place. Processes, all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.peers import smg_command, vllm_router_command
from bench.routing.engines import MODEL, Engines
from bench.routing.policies import Contestant, sections
from bench.routing.priority import Priority, starting
from bench.routing.tokenizer import write_tokenizer
from extproc.config import Config
from extproc.replay_index import Index
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from workers.process import Child, stop_all
from workers.ready import free_ports, wait_ready

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_PATIENCE_S = 1800


class Router:
    """A running router: where it listens, and its processes. Context manager; stopped on the way out."""

    def __init__(self, contestant: Contestant, engines: Engines, directory: Path, peers: Path) -> None:
        self.contestant = contestant
        self._engines = engines
        self._directory = directory
        self._peers = peers
        self.port, self._admin, self._envoy_admin = free_ports(3)
        self.children: list[Child] = []

    def __enter__(self) -> Router:
        start: Callable[[], None] = {
            "baton": self._start_baton,
            "vllm-router": self._start_vllm_router,
            "smg": self._start_smg,
        }[self.contestant.kind]
        with ExitStack() as parts:
            parts.callback(self._stop)
            with starting(Priority.ROUTER):
                start()
            parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        stop_all(self.children)

    @property
    def admin(self) -> str | None:
        """Where Baton's metrics are, ``host:port``; None for another router."""
        return f"{_HOST}:{self._admin}" if self.contestant.kind == "baton" else None

    def _child(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        log = self._directory / f"{name}-{self.contestant.name}.log"
        child = Child(name, argv, log=log, env=dict(env or {}), grace_s=3.0)
        self.children.append(child)
        return child

    def _start_baton(self) -> None:
        config = self._config()
        config_file, envoy_file = write_configs(config, self._directory)
        oracle = [sys.executable, "-m", "bench.routing.oracle", "--config", str(config_file)]
        looks = self.contestant.index is Index.ORACLE
        filter_ = self._child("filter", oracle if looks else filter_command(config_file))
        await_endpoints(config, filter_)
        with starting(Priority.PROXY):
            envoy = self._child("envoy", envoy_command(find_envoy(), envoy_file))
        wait_ready(filter_, f"http://{_HOST}:{self._admin}/healthz", _START_TIMEOUT_S)
        wait_ready(envoy, f"http://{_HOST}:{self._envoy_admin}/ready", _START_TIMEOUT_S)

    def _config(self) -> Config:
        engines = self._engines
        base = stack_config(
            self._directory,
            prefill=engines.prefill,
            decode=engines.decode,
            listen=f"{_HOST}:{self.port}",
            admin=f"{_HOST}:{self._admin}",
            envoy_admin=f"{_HOST}:{self._envoy_admin}",
            lease_s=120.0,
        )
        options = engines.options
        chosen = sections(
            self.contestant,
            block_tokens=options.block_tokens,
            cache_tokens=options.cache_tokens,
            speed=options.speed,
            tokenizer=write_tokenizer(self._directory / MODEL) if self.contestant.events else None,
        )
        tree = msgspec.to_builtins(base) | chosen
        # An overloaded round robin makes its clients wait for minutes, and that is to be seen, not cut off.
        tree["prefill"] |= {"timeout_s": _PATIENCE_S, "tokenise_once": False}
        tree["envoy"]["idle_timeout_s"] = 2 * _PATIENCE_S
        tree["log_level"] = "warning"
        # The engines count prompts: those of a warm-up would be among them, and there is no handshake to be spared.
        tree["warm_up"] = {"enabled": False}
        return msgspec.convert(tree, Config)

    def _start_vllm_router(self) -> None:
        argv = vllm_router_command(
            self._peers,
            prefill=self._engines.prefill,
            decode=self._engines.decode,
            port=self.port,
            metrics_port=self._admin,
            patience_s=_PATIENCE_S,
            options=self.contestant.options,
            publishers=self._engines.publishers if self.contestant.events else {},
        )
        env = {}
        if self.contestant.events:
            env["VLLM_ROUTER_TOKENIZER"] = str(write_tokenizer(self._directory / MODEL))
        wait_ready(self._child("router", argv, env), f"http://{_HOST}:{self.port}/health", _START_TIMEOUT_S)

    def _start_smg(self) -> None:
        argv = smg_command(
            self._peers,
            self._directory,
            prefill=self._engines.prefill,
            decode=self._engines.decode,
            port=self.port,
            metrics_port=self._admin,
            patience_s=_PATIENCE_S,
            load_interval_s=max(1, round(10 / self._engines.options.speed)),
            options=self.contestant.options,
        )
        wait_ready(self._child("router", argv), f"http://{_HOST}:{self.port}/readiness", _START_TIMEOUT_S)
