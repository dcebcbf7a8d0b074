"""A command as text that can be pasted into a shell, without its secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

_SECRET_NAME = re.compile(r"(TOKEN|API_KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|ACCESS_KEY(_ID)?)$")
_SECRET_FLAGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_NOT_SECRET = frozenset(("TOKENIZERS_PARALLELISM",))


def is_secret(name: str) -> bool:
    """Whether the value of a variable of this name must not be shown."""
    return name not in _NOT_SECRET and _SECRET_NAME.search(name.upper()) is not None


def as_shell(argv: Sequence[str], env: Mapping[str, str], unset: Sequence[str] = ()) -> str:
    """The command with a line for each variable and each option. A secret stands as ``"$NAME"``, which the shell fills in."""
    lines = []
    if unset:
        lines.append("env " + " ".join(f"-u {name}" for name in unset))
    lines += [f'{name}="${name}"' if is_secret(name) else f"{name}={shlex.quote(value)}" for name, value in env.items()]
    lines += _options(argv)
    return " \\\n  ".join(lines)


def _options(argv: Sequence[str]) -> list[str]:
    """An option and its values on one line; what comes before the first option is the first line."""
    lines: list[str] = []
    secret: str | None = None
    for index, argument in enumerate(argv):
        flag, equals, _ = argument.partition("=")
        if flag in _SECRET_FLAGS and equals:
            text = f'{flag}="${_SECRET_FLAGS[flag]}"'
        elif secret is not None and not argument.startswith("-"):
            text = f'"${secret}"'
        else:
            text = shlex.quote(argument)
        secret = _SECRET_FLAGS.get(argument) if argument.startswith("-") else secret
        if lines and not (argument.startswith("--") and index > 0):
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines
