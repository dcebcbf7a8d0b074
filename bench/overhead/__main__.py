"""``make bench-overhead``: what Baton, or a peer, costs between clients and workers that answer at once or stream."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.overhead import judge, picture, report, results
from bench.overhead.machine import machine
from bench.overhead.options import Options, OptionsError, parse
from bench.overhead.results import Results, ResultsError
from bench.overhead.runs import Run
from bench.overhead.talk import TalkError
from bench.overhead.wrk import LoadError
from bench.peers import MissingPeerError
from extproc.config import ConfigError
from extproc.stack import UpError
from workers.ready import PartError

_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if a bar was missed or something did not run; 2 for options; 130 for Ctrl-C."""
    console = Console(width=150, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parse(arguments)
        measured, interrupted = (results.read(options.read), False) if options.read else _measure(options, say)
    except (OptionsError, ResultsError) as error:
        say(f"bench: {error}")
        return 2
    except OSError as error:
        say(f"bench: {error}")
        return 1
    for table in report.tables(measured):
        console.print(table)
    verdicts = judge.verdicts(measured)
    for line in (*map(str, verdicts), *report.fault_lines(measured), *(f"failed: {each}" for each in measured.failures)):
        say(line)
    try:
        if options.json is not None:
            results.write(measured, [each.as_json() for each in verdicts], options.json)
        if options.out is not None:
            options.out.write_text(picture.svg(measured), encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text(report.markdown(measured), encoding="utf-8")
    except OSError as error:
        say(f"bench: {error}")
        return 1
    if interrupted:
        return _INTERRUPTED
    missed = options.judged and not all(each.met or each.aim for each in verdicts)
    return 1 if missed or measured.failures or report.fault_lines(measured) else 0


def _measure(options: Options, say: report.Say) -> tuple[Results, bool]:
    """What was measured, and whether Ctrl-C has cut it short."""
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run = Run(options, Path(name), say)
        try:
            run.run()
        except KeyboardInterrupt:
            say("\ninterrupted; what there is:")
            interrupted = True
        except (PartError, MissingPeerError, ConfigError, UpError, LoadError, TalkError, OSError) as error:
            run.failures.append(str(error))
    found = Results(
        machine=machine(),
        options={name: str(value) for name, value in vars(options).items()},
        cells=run.cells,
        stream_cells=run.stream_cells,
        idle=run.idle,
        failures=run.failures,
    )
    return found, interrupted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
