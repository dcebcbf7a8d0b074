"""The command line of the bench."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from bench.interference.arrangements import ARRANGEMENTS, Engine
from bench.interference.load import LOADS, Load, changed
from workers import cores
from workers.model import SMOLLM2
from workers.spec import Device

_ROUNDS, _QUICK_ROUNDS = 3, 1
_QUICK_PROMPTS = 2
_GPUS = 2
_EXAMPLES = """
examples:
  python -m bench.interference
      real vLLM: on two GPUs if this machine has them, else on its CPU; about six minutes on two cores
  python -m bench.interference --quick
      one round of each: under three minutes
  python -m bench.interference --engine sim --quick
      the simulated engine, under a minute: does the bench itself work here?
  python -m bench.interference --json numbers.json --out interference.svg --markdown interference.md
  python -m bench.interference --from numbers.json --out interference.svg
      nothing is measured: tables and picture of what was measured before
  python -m bench.interference --device gpu --model Qwen/Qwen3-8B --prompt-tokens 8000 --chunk-tokens 1024
"""


class OptionsError(ValueError):
    """The options cannot be what was meant; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    engine: Engine
    device: Device
    model: str
    names: tuple[str, ...]
    rounds: int
    seed: int
    load: Load
    cores: tuple[int, ...]
    fresh: bool
    """Each arrangement is started anew for each round; else it stands still while others are measured."""
    threshold_tokens: int
    start_timeout_s: float
    logs: Path | None
    read: Path | None
    json: Path | None
    out: Path | None
    markdown: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Raises OptionsError, and SystemExit as argparse does."""
    parser = _parser()
    given = parser.parse_args(arguments)
    device: Device = given.device or ("gpu" if given.engine == "vllm" and not given.read and gpus() >= _GPUS else "cpu")
    names = tuple(ARRANGEMENTS) if given.only is None else tuple(given.only.split(","))
    unknown = [name for name in names if name not in ARRANGEMENTS]
    if unknown:
        raise OptionsError(f"--only: no {', '.join(unknown)}; there are {', '.join(ARRANGEMENTS)}")
    usable = tuple(cores.usable())
    if given.cores is not None and not 1 <= given.cores <= max(1, len(usable)):
        raise OptionsError(f"--cores {given.cores}: this process may use {len(usable)}")
    rounds = given.rounds if given.rounds is not None else _QUICK_ROUNDS if given.quick else _ROUNDS
    if not 1 <= rounds <= 100:
        raise OptionsError(f"--rounds {rounds}: 1 to 100")
    options = Options(
        engine=given.engine,
        device=device,
        model=given.model,
        names=names,
        rounds=rounds,
        seed=given.seed,
        load=_load(given, LOADS["sim" if given.engine == "sim" else device]),
        cores=usable[: given.cores],
        fresh=given.fresh or (device == "gpu" and given.engine == "vllm"),
        threshold_tokens=given.threshold_tokens,
        start_timeout_s=given.start_timeout,
        logs=given.logs,
        read=given.read,
        json=given.json,
        out=given.out,
        markdown=given.markdown,
    )
    if options.threshold_tokens < 0:
        raise OptionsError(f"--threshold-tokens {options.threshold_tokens}: 0 or more")
    if options.threshold_tokens > options.load.prompt_tokens:
        raise OptionsError(
            f"--threshold-tokens {options.threshold_tokens}: the long prompts, of {options.load.prompt_tokens} tokens, "
            "are to be handed over"
        )
    for option, file in (("--json", options.json), ("--out", options.out), ("--markdown", options.markdown)):
        if file is not None and not file.parent.is_dir():  # said now, and not when everything has been measured
            raise OptionsError(f"{option} {file}: there is no folder {file.parent}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.interference",
        description=(
            "What long prompts do to streams that are being written, on real engines: one worker for both, the same with "
            "chunked prefill, and a prefill and a decode worker behind Baton."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=get_args(Engine), default="vllm", help="real or simulated (default: vllm)")
    parser.add_argument("--device", choices=get_args(Device), help="default: gpu where there are two, else cpu")
    parser.add_argument("--model", default=SMOLLM2, help=f"{SMOLLM2}, a folder, or a name on the hub (default: {SMOLLM2})")
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(ARRANGEMENTS)}")
    parser.add_argument("--rounds", type=int, help=f"of each, in a new order each time (default: {_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} round with {_QUICK_PROMPTS} long prompts")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default: 1)")
    sizes = parser.add_argument_group("the load; the defaults depend on what the workers run on")
    for flag, kind, text in (
        ("--streams", int, "at once"),
        ("--stream-prompt-tokens", int, "of a stream's prompt"),
        ("--stream-tokens", int, "of a stream's answer"),
        ("--prompt-tokens", int, "of a long prompt"),
        ("--prompt-answer-tokens", int, "of its answer"),
        ("--every", float, "seconds from one long prompt to the next"),
        ("--quiet", float, "seconds without long prompts at the beginning of a round"),
        ("--window", float, "seconds of a round"),
        ("--chunk-tokens", int, "of a step with chunked prefill"),
    ):
        sizes.add_argument(flag, type=kind, help=text)
    parser.add_argument(
        "--threshold-tokens", type=int, default=0, help="Baton hands over prompts from this length on (default: 0)"
    )
    parser.add_argument("--cores", type=int, help="CPU only: use so many (default: all that this process may use)")
    parser.add_argument("--fresh", action="store_true", help="start everything anew for each round, as is always done on GPUs")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds until engines must be up (default: 600)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all processes there; it must be new")
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE", help="measure nothing, read what --json wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture there, .svg or .png")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    return parser


def _load(given: argparse.Namespace, default: Load) -> Load:
    if given.quick:
        default = replace(default, window_s=default.quiet_s + _QUICK_PROMPTS * default.every_s)
    try:
        return changed(
            default,
            {
                "streams": given.streams,
                "stream_prompt_tokens": given.stream_prompt_tokens,
                "stream_tokens": given.stream_tokens,
                "prompt_tokens": given.prompt_tokens,
                "prompt_answer_tokens": given.prompt_answer_tokens,
                "every_s": given.every,
                "quiet_s": given.quiet,
                "window_s": given.window,
                "chunk_tokens": given.chunk_tokens,
            },
        )
    except ValueError as error:
        field, _, text = str(error).partition(": ")
        raise OptionsError(f"--{field.removesuffix('_s').replace('_', '-')}: {text}") from error


def gpus() -> int:
    """How many NVIDIA GPUs this machine has, by its driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
