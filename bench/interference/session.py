"""The order of it all: what is started when, whose turn it is, and what is said meanwhile."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.interference import client
from bench.interference.arrangements import TITLES, Arrangement, Setting, arrangement, sim_model
from bench.interference.load import Script
from bench.interference.numbers import faults, row
from bench.interference.options import Options
from bench.interference.results import Round
from bench.interference.running import Running, Say, on_turn
from extproc.stack import UpError, find_envoy
from workers import model

_AHEAD_OF_ROUNDS = 0
"""The number of the round whose prompts warm up; those that are measured count from 1."""


class Session:
    """One whole bench. What was measured so far is in ``rounds``, whatever comes then."""

    def __init__(self, options: Options, folder: Path, say: Say, interrupted: Callable[[], None]) -> None:
        """Raises UpError, ModelError."""
        self.rounds: list[Round] = []
        self._options = options
        self._folder = folder
        self._say = say
        self._interrupted = interrupted
        find_envoy()
        self._setting = _setting(options, say)
        self._arrangements = {name: arrangement(name, self._setting, options.load) for name in options.names}

    @property
    def described(self) -> dict[str, str]:
        """Arrangement -> what it runs on."""
        return {name: each.described for name, each in self._arrangements.items()}

    def run(self) -> None:
        """All rounds. Raises PartError, ConfigError, UpError, OSError."""
        load = self._options.load
        many = self._options.rounds * len(self._arrangements)
        self._say(f"{many} measurements of {load.window_s:g} s: {many * load.window_s / 60:.1f} minutes, and the starts")
        with ExitStack() as parts:
            kept = {} if self._options.fresh else self._start_all(parts)
            for number in range(1, self._options.rounds + 1):
                for name in rotated(self._options.names, number - 1):
                    with self._one(name, number, kept) as running:
                        self._measure(running, number)

    def _start_all(self, parts: ExitStack) -> dict[str, Running]:
        self._say("starting all engines")
        kept = {name: parts.enter_context(self._running(each, name)) for name, each in self._arrangements.items()}
        for running in kept.values():
            running.wait_ready(self._options.start_timeout_s)
        for running in kept.values():
            running.pause()
        for running in kept.values():
            with on_turn(running):
                self._warm(running, _AHEAD_OF_ROUNDS)
        return kept

    @contextmanager
    def _one(self, name: str, number: int, kept: dict[str, Running]) -> Iterator[Running]:
        if name in kept:
            with on_turn(kept[name]) as running:
                yield running
            return
        self._say(f"starting {TITLES[name]}")
        with self._running(self._arrangements[name], f"{name}-{number}") as running:
            running.wait_ready(self._options.start_timeout_s)
            self._warm(running, _AHEAD_OF_ROUNDS)
            yield running

    def _running(self, each: Arrangement, folder: str) -> Running:
        return Running(
            each,
            self._folder / folder,
            model=self._setting.served_model_name,
            threshold_tokens=self._options.threshold_tokens,
            say=self._say,
            interrupted=self._interrupted,
        )

    def _warm(self, running: Running, number: int) -> None:
        took_s = running.warm_up(Script(self._options.load, self._options.seed, number).warm_up())
        if number != _AHEAD_OF_ROUNDS:
            return
        polling = running.settle()
        behind = f"; {polling} polling threads come after others now" if polling else ""
        self._say(f"  {TITLES[running.arrangement.name]}: a long prompt alone took {took_s:.1f} s{behind}")

    def _measure(self, running: Running, number: int) -> None:
        options, name = self._options, running.arrangement.name
        self._warm(running, number)
        script = Script(options.load, options.seed, number)
        self._say(f"round {number} of {options.rounds}: {TITLES[name]}")
        began_s = time.monotonic()
        played = client.play(running.url, self._setting.served_model_name, script, name, number, running.check)
        self.rounds.append(played)
        found = row(name, [played], options.load.prompt_tokens)
        wrong = f"; {len(faults([played]))} kinds of faults" if found.faults else ""
        self._say(
            f"  {time.monotonic() - began_s:.0f} s: ITL p50 {found.itl_p50_s * 1e3:.0f} ms, "
            f"p99 {found.itl_p99_s * 1e3:.0f} ms, longest {found.longest_s * 1e3:.0f} ms; "
            f"TTFT of long prompts {found.prompt_ttft_p50_s:.1f} s{wrong}"
        )


def rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Everybody is first, second and last equally often in as many rounds as there are names."""
    by %= len(names)
    return names[by:] + names[:by]


def _setting(options: Options, say: Say) -> Setting:
    if options.engine == "sim":
        return Setting(
            engine="sim", device="cpu", model=sim_model(), served_model_name=sim_model(), local_model=False, cores=options.cores
        )
    for package in ("vllm", "nixl"):
        if importlib.util.find_spec(package) is None:
            raise UpError(f"the package {package} is not installed here: make install, or --engine sim")
    if options.model == model.SMOLLM2:
        say("preparing the model (converted once, which takes about half a minute)")
    source = model.resolve(options.model)
    return Setting(
        engine="vllm",
        device=options.device,
        model=str(source),
        served_model_name=model.served_name(options.model),
        local_model=isinstance(source, Path),
        cores=options.cores,
    )
