"""``python -m workers.sim``: every field of SimOptions as a flag."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from workers.sim.main import SimOptions, run


def parse(arguments: list[str]) -> SimOptions:
    """Flags to options."""
    parser = argparse.ArgumentParser(prog="python -m workers.sim", description="The strict simulated engine.")
    for field in dataclasses.fields(SimOptions):
        flag = "--" + field.name.replace("_", "-")
        kind, text = str(field.type), str(field.metadata["help"])
        if kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif kind.startswith("tuple"):
            parser.add_argument(flag, nargs="+", default=field.default, help=text)
        else:
            convert: Any = int if kind.startswith("int") else float if kind.startswith("float") else str
            parser.add_argument(flag, type=convert, default=field.default, help=text)
    given = vars(parser.parse_args(arguments)).items()
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    return SimOptions(**values)


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
