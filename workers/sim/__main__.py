"""``python -m workers.sim``: every field of SimOptions as a flag."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from workers.sim.main import SimOptions, run

_EXAMPLES = """examples:
  %(prog)s                                          one worker on port 8100
  %(prog)s --workers 8 --speed 0 --control-port 8099   eight of them on ports 8100 to 8107, without waiting
  curl -X POST localhost:8100/sim/faults -d '{"kind": "slow", "factor": 3, "duration_s": 10}'
  curl localhost:8100/sim/violations                what a router did wrong
"""


def parse(arguments: list[str], prog: str = "python -m workers.sim") -> SimOptions:
    """Flags to options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="The strict simulated engine: a vLLM without a GPU that forgives nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(SimOptions):
        flag = "--" + field.name.replace("_", "-")
        kind, text = str(field.type), str(field.metadata["help"])
        if kind == "bool":
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=field.default, help=f"{text}{_default(field.default)}"
            )
        elif kind.startswith("tuple"):
            parser.add_argument(flag, nargs="+", default=field.default, help=f"{text}{_default(field.default)}")
        else:
            convert: Any = int if kind.startswith("int") else float if kind.startswith("float") else str
            parser.add_argument(flag, type=convert, default=field.default, help=f"{text}{_default(field.default)}")
    given = vars(parser.parse_args(arguments)).items()
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    return SimOptions(**values)


def _default(value: object) -> str:
    return "" if value is None or value == () else f" (default: {' '.join(value) if isinstance(value, tuple) else value})"


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
