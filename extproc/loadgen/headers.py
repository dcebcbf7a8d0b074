"""Headers of requests: those of all, and those that a draw decides, such as a tenant; and the key, which nobody is shown."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extproc import worker_key
from extproc.loadgen.errors import BenchError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS = frozenset({"content-type", "content-length", "host", "transfer-encoding"})


@dataclass(frozen=True)
class Drawn:
    """A header whose value is drawn for each request."""

    name: str
    values: tuple[str, ...]
    weights: tuple[float, ...]


def parse_header(text: str) -> tuple[str, str]:
    """``name=value``. Raises BenchError; the message never has the value, which may be a secret."""
    name, equals, value = text.partition("=")
    name = name.strip().lower()
    if not equals or not _NAME.fullmatch(name):
        raise BenchError(f"header {name!r}: write name=value")
    _check(name, value)
    return name, value.strip()


def parse_drawn(text: str) -> Drawn:
    """``name=value,value`` or ``name=value:weight,…``: each value as often as its weight says (1 where none is given)."""
    name, equals, rest = text.partition("=")
    name = name.strip().lower()
    if not equals or not _NAME.fullmatch(name):
        raise BenchError(f"vary {text!r}: write name=value:weight,value:weight")
    values, weights = [], []
    for part in rest.split(","):
        value, colon, weight = part.strip().rpartition(":")
        if not colon:
            value, weight = part.strip(), "1"
        try:
            number = float(weight)
        except ValueError:
            raise BenchError(f"vary {name}: {part.strip()!r}: the weight {weight!r} is not a number") from None
        if not 0 < number < float("inf") or not value:
            raise BenchError(f"vary {name}: {part.strip()!r}: write value:weight, the weight above 0")
        _check(name, value)
        values.append(value)
        weights.append(number)
    if len(set(values)) != len(values):
        raise BenchError(f"vary {name}: a value is there twice")
    return Drawn(name, tuple(values), tuple(weights))


def draw(drawn: Sequence[Drawn], count: int, seed: int) -> list[dict[str, str]]:
    """The drawn headers of each of ``count`` requests. Those of one name do not depend on what other names there are."""
    columns = []
    for each in drawn:
        source = random.Random(f"{seed} {each.name}")  # noqa: S311 (not a secret)
        columns.append(source.choices(each.values, each.weights, k=count))
    return [{each.name: column[number] for each, column in zip(drawn, columns, strict=True)} for number in range(count)]


def key_headers(*, key_file: str | None, key_env: str | None, environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """``authorization: Bearer …`` from a file or a variable; empty without either. Raises BenchError and OSError."""
    if key_file is not None and key_env is not None:
        raise BenchError("the key comes from a file or from a variable, not from both")
    if key_env is None:
        return worker_key.headers(key_file)
    key = environ.get(key_env, "").strip()
    if not key:
        raise BenchError(f"the variable {key_env} is not set, or empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise BenchError(f"the variable {key_env}: one key, printable and without spaces, is wanted there")
    return {"authorization": f"Bearer {key}"}


def _check(name: str, value: str) -> None:
    if name in _OURS:
        raise BenchError(f"header {name}: it is the generator's own")
    if not (value.isascii() and value.isprintable()):
        raise BenchError(f"header {name}: its value has characters that no header may have")
