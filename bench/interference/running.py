"""An arrangement as processes: started, made ready, stopped for a while and continued, and ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from bench.interference import client, pollers
from bench.interference.arrangements import Arrangement
from bench.interference.load import Ask
from extproc.config import Config
from extproc.policy_config import PolicyRule
from extproc.stack import await_endpoints, envoy_command, filter_command, find_envoy, stack_config, write_configs
from workers import cores
from workers.process import Child, stop_all
from workers.ready import PartError, answers, check_alive, free_ports, wait_ready

_HOST = "127.0.0.1"
_READY_S = 60.0
_WARM_UP_S = 120.0
_PROGRESS_S = 10.0
_POLL_S = 0.2
_GRACE_S = 3.0
_LOOK_S = 1.0

Say = Callable[[str], None]


class Running:
    """One arrangement. A context manager: nothing of it is left at the end."""

    def __init__(
        self,
        arrangement: Arrangement,
        folder: Path,
        *,
        model: str,
        threshold_tokens: int,
        say: Say,
        interrupted: Callable[[], None],
    ) -> None:
        """Start its workers. Raises OSError."""
        self.arrangement = arrangement
        self._folder = folder
        self._model = model
        self._threshold_tokens = threshold_tokens
        self._say = say
        self._interrupted = interrupted
        self._children: list[Child] = []
        self._began_s = time.monotonic()
        folder.mkdir(parents=True)
        try:
            for worker in arrangement.workers:
                name = worker.name if not arrangement.apart else f"{arrangement.name}-{worker.name}"
                self._start(name, worker.command.argv, env=worker.command.env)
            self.url = f"http://{_HOST}:{arrangement.workers[0].spec.port}"
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, name: str, argv: Sequence[str], env: dict[str, str] | None = None) -> Child:
        child = Child(name, argv, log=self._folder / f"{name}.log", env=env, grace_s=_GRACE_S)
        self._children.append(child)
        return child

    def wait_ready(self, timeout_s: float) -> None:
        """Until its workers answer; each is then pinned. Raises PartError."""
        waiting = list(zip(self.arrangement.workers, self._children, strict=True))
        told_s = time.monotonic()
        while waiting:
            self._interrupted()
            for worker, child in list(waiting):
                check_alive(child)
                if answers(f"http://{_HOST}:{worker.spec.port}/health"):
                    waiting.remove((worker, child))
                    cores.pin(child.pids(), worker.cores)
                    where = f", on core {'+'.join(map(str, worker.cores))}" if worker.cores else ""
                    self._say(f"  {child.name} is ready after {time.monotonic() - self._began_s:.0f} s{where}")
            elapsed_s = time.monotonic() - self._began_s
            if waiting and elapsed_s > timeout_s:
                _, late = waiting[0]
                raise PartError(f"{late.name} is not ready after {timeout_s:g} s; the end of {late.log}:\n{late.tail()}")
            if waiting and time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                self._say(f"  {elapsed_s:.0f} s: waiting for {', '.join(child.name for _, child in waiting)}")
            time.sleep(_POLL_S if waiting else 0)
        if self.arrangement.apart:
            self._front()

    def _front(self) -> None:
        """Envoy and the filter. Raises PartError, ConfigError, UpError."""
        port, admin, envoy_admin = free_ports(3)
        prefill, decode = (
            [f"{_HOST}:{worker.spec.port}" for worker in self.arrangement.workers if worker.spec.role == role]
            for role in ("prefill", "decode")
        )
        base = stack_config(
            self._folder,
            prefill=prefill,
            decode=decode,
            listen=f"{_HOST}:{port}",
            admin=f"{_HOST}:{admin}",
            envoy_admin=f"{_HOST}:{envoy_admin}",
            lease_s=self.arrangement.workers[0].spec.kv_lease_s,
        )
        rule = PolicyRule(name="long", threshold_uncached_tokens=self._threshold_tokens)
        config: Config = msgspec.structs.replace(base, policies=[rule])
        config_file, envoy_file = write_configs(config, self._folder)
        filter_ = self._start("filter", filter_command(config_file))
        await_endpoints(config, filter_)
        envoy = self._start("envoy", envoy_command(find_envoy(), envoy_file))
        wait_ready(envoy, f"http://{_HOST}:{envoy_admin}/ready", _READY_S)
        wait_ready(filter_, f"http://{_HOST}:{admin}/healthz", _READY_S)
        self.url = f"http://{_HOST}:{port}"

    def check(self) -> None:
        """Raises PartError where a process has ended, and KeyboardInterrupt where somebody has had enough."""
        self._interrupted()
        for child in self._children:
            check_alive(child)

    def warm_up(self, asks: Iterator[Ask]) -> float:
        """Until a long prompt is served as it is to be; how long the last one took. Raises PartError.

        After a pause the filter has to find its workers again, and the first handoff of a pair makes them meet.
        """
        deadline_s = time.monotonic() + _WARM_UP_S
        while True:
            self.check()
            began_s = time.monotonic()
            answer = client.once(self.url, self._model, next(asks), _WARM_UP_S)
            wrong = answer.fault or ("not handed over" if self.arrangement.apart and not answer.handed_over else "")
            if not wrong:
                return time.monotonic() - began_s
            if time.monotonic() > deadline_s:
                raise PartError(f"{self.arrangement.name} does not serve a long prompt: {wrong}; logs are in {self._folder}")
            time.sleep(_POLL_S)

    def settle(self) -> int:
        """Threads that poll while nothing is asked give way where cores are shared; returns how many there are."""
        pinned = [child for worker, child in zip(self.arrangement.workers, self._children, strict=False) if worker.cores]
        if not pinned:
            return 0
        return pollers.put_behind(pollers.polling([pid for child in pinned for pid in child.pids()], _LOOK_S))

    def pause(self) -> None:
        """All its processes stand still: idle engines poll, and would take cores from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """They go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            for pid in child.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def stop(self) -> None:
        """End all of it. One that stands still would not hear of it."""
        self.resume()
        stop_all(self._children)


@contextmanager
def on_turn(running: Running) -> Iterator[Running]:
    """One that stands still goes on for as long as this lasts."""
    running.resume()
    try:
        yield running
    finally:
        running.pause()
