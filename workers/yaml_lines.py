"""YAML text -> a typed value; what is wrong with it is said with file, line and field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

T = TypeVar("T")

Step = str | int
"""One step into a tree: a key of a mapping, or an index of a sequence."""

_ANY_KEY = "..."
"""msgspec's step for a key that it does not name."""

# How msgspec and ruamel.yaml word what we take apart. Where a wording is not known, it is passed on as it is.
_AT = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_TWICE = re.compile(r'^found duplicate key "(?P<key>.*?)" with value', re.DOTALL)
# How our own checks begin: `field: why`, or the field as the first word.
_OWN_FIELD = re.compile(r"^(?P<field>[a-z_]\w*(?:\.[\w-]+|\[\d+\]|\['[^']*'\])*)(?P<colon>:?) (?P<why>.*)$", re.DOTALL)
_DOTTED = re.compile(r"\b[a-z_]\w*(?:\.[a-z_]\w*)+")
_STEP = re.compile(r"\[(?P<index>\d+)\]|\[(?P<any>\.\.\.)\]|\['(?P<quoted>[^']*)'\]|\.?(?P<key>[^.\[\]]+)")
_PLAIN_KEY = re.compile(r"[\w-]+")


class FaultError(ValueError):
    """The text cannot be used: ``file:line: field: why``."""


def decode(text: str, schema: type[T], *, source: str, edit: Callable[[Any], object] | None = None) -> T:
    """YAML text -> ``schema``. ``source`` names the text in errors. Raises FaultError, also for a key that stands twice.

    ``edit`` makes another tree of what the text says, before it is looked at. It must leave everything in its place.
    """
    try:
        tree = YAML(typ="safe").load(text)
    except YAMLError as error:
        line, why = _syntax(error, text)
        raise FaultError(f"{_place(source, line)}: {why}") from error
    except RecursionError:
        raise FaultError(f"{source}: nested too deeply") from None
    except ValueError as error:  # a scalar that is not what it looks like, such as 2024-13-01
        raise FaultError(f"{source}: not YAML: {error}") from error
    if edit is not None:
        tree = edit(tree)
    try:
        return msgspec.convert(tree, schema)
    except msgspec.ValidationError as error:
        places, why = _content(str(error), tree, schema)
        raise FaultError(f"{_place(source, _best_line(text, places))}: {why}") from error


def line_of(text: str, steps: Iterable[Step]) -> int | None:
    """The line (from 1) of the key or item at ``steps``, or of the nearest one around it; None if there is none.

    ``text`` must be YAML.
    """
    return _walk(YAML(typ="safe", pure=True).compose(text), steps)[0]


def steps_of(path: str) -> tuple[Step, ...]:
    """``"policies[1].slo.ttft_s"`` -> ``("policies", 1, "slo", "ttft_s")``."""
    return tuple(int(step["index"]) if step["index"] else step[step.lastgroup or 0] for step in _STEP.finditer(path))


def path_of(steps: Iterable[Step]) -> str:
    """The way back: ``("policies", 1, "slo")`` -> ``"policies[1].slo"``, and ``("names", "a.b")`` -> ``"names['a.b']"``."""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            path += f".{step}" if path else step
        else:
            path += f"['{step}']"
    return path


def _place(source: str, line: int | None) -> str:
    return source if line is None else f"{source}:{line}"


def _best_line(text: str, places: Sequence[Sequence[Step]]) -> int | None:
    """The line of the first place that stands in the text; else the nearest one around the first."""
    root = YAML(typ="safe", pure=True).compose(text)
    walks = [(*_walk(root, steps), len(steps)) for steps in places]
    return next((line for line, depth, length in walks if depth == length), walks[0][0])


def _walk(node: Node | None, steps: Iterable[Step]) -> tuple[int | None, int]:
    """The line of the last step that the text has, and how many steps it has."""
    line: int | None = None
    depth = 0
    for step in steps:
        found = _child(node, step)
        if found is None:
            break
        line, node = found
        depth += 1
    return line, depth


def _syntax(error: YAMLError, text: str) -> tuple[int | None, str]:
    """Line and wording of what ruamel.yaml refuses."""
    if isinstance(error, ReaderError):
        return text.count("\n", 0, error.position) + 1, f"not YAML: {error.reason}"
    if not isinstance(error, MarkedYAMLError):
        return None, f"not YAML: {error}"
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    twice = _TWICE.match(error.problem or "")
    if isinstance(error, DuplicateKeyError) and twice is not None:
        return line, f"the key {twice['key']!r} stands twice in the same mapping"
    return line, "not YAML: " + ", ".join(part for part in (error.context, error.problem) if part)


def _content(message: str, tree: object, schema: object) -> tuple[list[tuple[Step, ...]], str]:
    """Where a message of msgspec may point, and the message with the field in front."""
    at = _AT.search(message)
    why = message[: at.start()] if at else message
    steps = steps_of(at["path"]) if at else ()
    while _ANY_KEY in steps:
        steps = _with_the_key(steps, message, tree, schema)
    own = _OWN_FIELD.match(why)
    if not steps and own:
        # A check of the whole: what it compares is named in it, and one of the two may be a default.
        return [steps_of(own["field"]), *(steps_of(path) for path in _DOTTED.findall(own["why"]))], why
    if at and at["key"]:
        key = next((key for key in _mapping_at(tree, steps) if not isinstance(key, str)), "")
        steps, why = (*steps, str(key)), "a key must be text"
    elif unknown := _UNKNOWN.match(why):
        name = unknown["name"]
        close = difflib.get_close_matches(name, _fields(schema, steps), 1)
        steps, why = (*steps, name), "unknown field" + (f"; did you mean {close[0]}?" if close else "")
    elif missing := _MISSING.match(why):
        steps, why = (*steps, missing["name"]), "this field is required"
    elif own and own["colon"]:
        steps, why = (*steps, *steps_of(own["field"])), own["why"]
    else:
        why = why.replace("`", "")
    path = path_of(steps)
    return [steps], f"{path}: {why}" if path else why


def _with_the_key(steps: tuple[Step, ...], message: str, tree: object, schema: object) -> tuple[Step, ...]:
    """``steps`` with the key in place of the first ``...``: the one that leads to the same message when it is alone."""
    index = steps.index(_ANY_KEY)
    before, after = steps[:index], steps[index + 1 :]
    for key, value in _mapping_at(tree, before).items():
        try:
            msgspec.convert(_replaced(tree, before, {key: value}), schema)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return (*before, str(key), *after)
    return before


def _mapping_at(tree: Any, steps: Iterable[Step]) -> Mapping[object, object]:
    for step in steps:
        tree = tree[step]
    assert isinstance(tree, dict)
    return tree


def _replaced(tree: Any, steps: tuple[Step, ...], value: object) -> object:
    """A copy of ``tree`` with ``value`` at ``steps``."""
    if not steps:
        return value
    copy = tree.copy()
    copy[steps[0]] = _replaced(tree[steps[0]], steps[1:], value)
    return copy


def _fields(schema: object, steps: Iterable[Step]) -> list[str]:
    """Names of the fields that may stand in the mapping at ``steps``."""
    kinds = list(_alternatives(inspect.type_info(schema)))
    for step in steps:
        kinds = [inner for kind in kinds for inner in _inner(kind, step)]
    return [field.encode_name for kind in kinds if isinstance(kind, inspect.StructType) for field in kind.fields]


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _inner(kind: inspect.Type, step: Step) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == step:
                yield from _alternatives(field.type)
    elif isinstance(kind, inspect.ListType):
        yield from _alternatives(kind.item_type)
    elif isinstance(kind, inspect.DictType):
        yield from _alternatives(kind.value_type)


def _child(node: Node | None, step: Step) -> tuple[int, Node] | None:
    """Line and node of what ``step`` leads to; a merge key (``<<``) is looked into."""
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        item = node.value[step]
        return item.start_mark.line + 1, item
    if not isinstance(node, MappingNode):
        return None
    for key, value in node.value:
        if key.value == step and key.tag != "tag:yaml.org,2002:merge":
            return key.start_mark.line + 1, value
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for merged in value.value if isinstance(value, SequenceNode) else (value,):
                if (found := _child(merged, step)) is not None:
                    return found
    return None
