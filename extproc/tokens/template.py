"""One chat template, rendered as transformers and vLLM render it. Needs jinja2, which is imported when one is made."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from extproc.tokens.conversation import CannotError, Conversation

_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Written behind a message that is to be continued, to find its end again."""


class Template:
    """Made once for a text. Rendering is safe for several threads."""

    def __init__(self, text: str, *, content_format: Literal["auto", "string", "openai"] = "auto") -> None:
        """Raises ValueError for what is no template."""
        import jinja2

        self.text = text
        environment = _environment()
        try:
            self._compiled = environment.from_string(text)
            tree = environment.parse(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"not a chat template: {error}") from None
        self.as_parts = content_format == "openai" or (content_format == "auto" and _wants_parts(tree))
        """It is given every content as a list of parts."""
        self.knows_developers = '"developer"' in text or "'developer'" in text

    def render(self, chat: Conversation, special_tokens: Mapping[str, str]) -> str:
        """The prompt as text. Raises CannotError where the template refuses the chat, or the chat it."""
        import jinja2

        messages, last = chat.messages, ""
        if chat.continue_final_message:
            messages, last = self._open_ended(messages)
        try:
            text: str = self._compiled.render(
                messages=messages,
                tools=chat.tools,
                documents=chat.documents,
                add_generation_prompt=chat.add_generation_prompt,
                **{**special_tokens, **chat.kwargs},
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError):
            raise CannotError("template_refused") from None
        return _cut_open(text, last) if chat.continue_final_message else text

    def _open_ended(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        if "content" not in self.text:
            raise CannotError("template_refused")
        messages = [*messages[:-1], copy.deepcopy(messages[-1])]
        final = messages[-1]
        content = final["content"]
        if isinstance(content, str):
            final["content"] = content + _OPEN_END
            return messages, content
        if not content:
            raise CannotError("template_refused")
        last: str = content[-1]["text"]
        content[-1]["text"] = last + _OPEN_END
        return messages, last


def _cut_open(text: str, last: str) -> str:
    tag = _OPEN_END.strip()
    if last.strip() not in text or tag not in text:
        raise CannotError("template_refused")
    at = text.rindex(tag)
    if text[at : at + len(_OPEN_END)] == _OPEN_END:
        return text[:at]
    return text[:at].rstrip()  # the template strips messages


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, for training; in a prompt its body is what counts."""

        tags = {"generation"}  # noqa: RUF012  # jinja's own interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    # The workers' own time of day: nobody tells which zone they are in.
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


# -- does a template loop over the parts of a content? What vLLM takes for that, found in its syntax tree ----------------------


def _wants_parts(tree: Any) -> bool:
    try:
        return _loops_over_content(tree)
    except ValueError:
        return False


def _loops_over_content(tree: Any) -> bool:
    from jinja2 import nodes

    messages = set(_message_names(tree))
    inside: set[int] = set()
    of_macro: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        passed = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            of_macro[id(loop)] = passed
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_is_item(over, name, "content") for name in messages):
            return True
        if not isinstance(over, nodes.Name):
            continue
        if over.name in of_macro.get(id(loop), ()) or (id(loop) not in inside and over.name == "content"):
            return True
    return False


def _content_parameters(tree: Any, macro: Any, messages: set[str]) -> set[str]:
    """Parameters of a macro that some call gives the content of a message."""
    from jinja2 import nodes

    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs if each.key in names)]
        found |= {name for name, value in given if any(_is_item(value, each, "content") for each in messages)}
    return found


def _message_names(tree: Any) -> Iterator[str]:
    """Variables that stand for one message: those of loops over ``messages`` or over what was assigned from it. Raises
    ValueError where vLLM gives up."""
    from jinja2 import nodes

    lists = ["messages"]
    for name in lists:  # which grows meanwhile
        for assignment in tree.find_all(nodes.Assign):
            if _is_var(assignment.node, name):
                given = _target(assignment)
                if given not in lists:
                    lists.append(given)
    for loop in tree.find_all(nodes.For):
        if any(_is_var(loop.iter, name) for name in lists):
            yield _target(loop)


def _target(node: Any) -> str:
    from jinja2 import nodes

    if not isinstance(node.target, nodes.Name):
        raise ValueError("not one variable")
    return str(node.target.name)


def _is_name(node: Any, name: str) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_var(node: Any, name: str) -> bool:
    """The variable itself, or it filtered, tested or sliced."""
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_var(node.node, name)
    if isinstance(node, nodes.Test):
        return _is_var(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_var(node.node, name)
    return _is_name(node, name)


def _is_item(node: Any, name: str, key: str) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_item(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _is_item(node.node, name, key)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_item(node.node, name, key)
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key
