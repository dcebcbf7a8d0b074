"""Variables of a compose file: the file ``.env``, and what stands for ``${NAME:-default}``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from workers.yaml_lines import Step, path_of

_ASSIGNMENT = re.compile(r"^(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)$")
_COMMENT = re.compile(r"\s+#.*$")
_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-?+])(?P<word>[^{}]*))?\}|(?P<odd>))"
)


class VariableError(ValueError):
    """A variable cannot be read or replaced."""

    def __init__(self, why: str, steps: tuple[Step, ...] = ()) -> None:
        super().__init__(why)
        self.steps = steps
        """Where in the tree."""


def parse_env(text: str, *, source: str) -> dict[str, str]:
    """The variables of a ``.env`` file: ``NAME=value`` lines, values in quotes or not, comments. Raises VariableError."""
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _ASSIGNMENT.match(line)
        if match is None:
            raise VariableError(f"{source}:{number}: not NAME=value")
        value = match["value"]
        if value[:1] in ("'", '"'):
            end = value.find(value[0], 1)
            if end < 0:
                raise VariableError(f"{source}:{number}: the quote does not end")
            found[match["name"]] = value[1:end]
        else:
            found[match["name"]] = "" if value.startswith("#") else _COMMENT.sub("", value)
    return found


def interpolate(tree: object, env: Mapping[str, str], steps: tuple[Step, ...] = ()) -> object:
    """``tree`` with its variables replaced, in every value and in no key. Raises VariableError with the place."""
    if isinstance(tree, dict):
        return {key: interpolate(value, env, (*steps, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolate(value, env, (*steps, index)) for index, value in enumerate(tree)]
    if isinstance(tree, str):
        try:
            return replaced(tree, env)
        except VariableError as error:
            raise VariableError(f"{path_of(steps)}: {error}", steps) from None
    return tree


def replaced(text: str, env: Mapping[str, str]) -> str:
    """``text`` with its variables replaced, as the Compose specification has it. Raises VariableError."""

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["bare"] or match["name"]
        if name is None:
            raise VariableError(f"{text!r}: a $ that begins no variable is written $$")
        here, how, word = env.get(name), match["how"] or "", match["word"] or ""
        unset = here is None or (how.startswith(":") and here == "")
        if how.endswith("+"):
            return "" if unset else word
        if not unset:
            return here or ""
        if how.endswith("?"):
            raise VariableError(f"the variable {name} is needed: {word or 'it is not set'}")
        return word if how.endswith("-") else ""

    return _VARIABLE.sub(value, text)
