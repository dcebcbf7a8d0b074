"""The references in ``docs/``, made from the code: ``python -m extproc.reference docs`` writes them.

Each is a pure function from the code to Markdown, so that a test can hold the files against it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import msgspec

from extproc import config, live_document
from extproc.errors import CODES
from extproc.handoff import Pair
from extproc.handoff.nixl_pull import NixlPull
from extproc.inference import LEGS, TRANSFER_KEYS, WHOLE_RULES
from extproc.observe.metrics import Metrics
from extproc.observe.reasons import REASONS
from extproc.paths import TABLE, Treatment

_GENERATED = "<!-- Made by `make generate` from the code; change that. -->\n"

_RANKS = {
    "what it needs": "KV events of all its engines ([KV events](kv-events.md)), in step",
    "named": "the engine that holds most of the prompt, where that saves `routing.rank_gain_s` over the mean of all of them; "
    "what it has more to do than the idlest is taken off before. Never one at which requests wait while none wait at another",
    "what it has to do": "the worker's metrics by `engine`, or what names it and has no answer yet, whichever is more",
    "prefill leg, and what goes whole": "by the seconds of computing and loading that it saves",
    "decode leg of a handoff": "only where the transfer that it saves takes that long, too",
    "else": "the mean of what its engines hold is expected, and not held against the worker (`cached_by`: `ranks`)",
    "its number": "its place among the engines of the server, from 0, also where their ranks begin elsewhere",
    "retries": "another worker gets none, or one of its own",
    "a client's own header": "is removed",
    "`/v1/responses`": "names none: vLLM 0.32 does not read the header there",
    "`handoff.connector: nixl_push`, `lmcache` or `llmd_sidecar`; `epp.fallback_endpoints`": "none is named: one engine is "
    "configured, or somebody else makes or takes a leg, for whom the number means another engine",
}
"""Of naming one of several engines behind one address: rows of a table."""


def configuration() -> str:
    """Every field of ``baton.yaml``."""
    lines = [
        _GENERATED,
        "# Configuration\n",
        "`baton serve` and `baton envoy-config` read one YAML file. Unknown keys, keys that stand twice and contradictions are",
        "refused, with file, line and field: `baton.yaml:14: policies[1].slo.ttft_s: Expected float | null, got str`.",
        "Below, `[]` is any item of a list and `*` any key.\n",
    ]
    lines += [
        "The smallest file:\n",
        "```yaml",
        "workers:",
        '  prefill: ["10.0.0.1:8100"]',
        '  decode: ["10.0.0.2:8200"]',
        "```\n",
    ]
    lines += _section("", config.Config)
    return "\n".join(lines) + "\n"


def _section(prefix: str, section: Any) -> list[str]:
    documented = _field_docs(section)
    rows: list[tuple[str, str, str, str]] = []
    below: dict[Any, list[str]] = {}
    for field in msgspec.structs.fields(section):
        name = f"{prefix}{field.name}"
        nested = list(_sections_in(field.type))
        for step, inner in nested:
            below.setdefault(inner, []).append(f"{name}{step}")
        if [step for step, _ in nested] == [""] and field.name not in documented:
            continue  # what it is stands above its own table
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = "required" if field.required else f"`{_yaml(value)}`"
        rows.append((f"`{name}`", _kind(field.type).replace("|", "\\|"), default, documented.get(field.name, "")))
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    lines = table if rows else []
    for inner, names in below.items():
        doc = " ".join((inspect.getdoc(inner) or "").split())
        # What several fields hold has one table, with the names of the first.
        lines += [f"\n## {', '.join(f'`{name}`' for name in names)}\n", f"{doc}\n", *_section(f"{names[0]}.", inner)]
    return lines


def _sections_in(kind: Any) -> Iterator[tuple[str, Any]]:
    """The sections that a type holds, with the way to them: none, ``[]`` in a list, ``.*`` in a mapping."""
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        yield "", kind
        return
    step = {list: "[]", Sequence: "[]", dict: ".*"}.get(typing.get_origin(kind), "")
    for inner in typing.get_args(kind):
        if typing.get_origin(kind) is not Literal:
            yield from ((f"{step}{further}", found) for further, found in _sections_in(inner))


def _kind(kind: Any) -> str:
    """A type as YAML's author sees it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_kind(each) for each in inner)
    if origin is Literal:
        return " | ".join(f"`{each}`" for each in inner)
    if origin is not None:
        name = "list" if origin is Sequence else origin.__name__
        return f"{name}[{', '.join(_kind(each) for each in inner)}]"
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return " | ".join(f"`{each.value}`" for each in kind)
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return "object"
    return "null" if kind is type(None) else str(kind.__name__)


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode().strip('"')


def _field_docs(section: Any) -> dict[str, str]:
    """The string below each field of a class."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def live() -> str:
    """Every field of the document of ``/live``."""
    lines = [
        _GENERATED,
        "# /live\n",
        "`GET /live` on the admin port gives what the [live page](observe.md#live-page) and `baton top` show, as one JSON",
        "document; `baton top --json` prints it. It is made at most twice a second, however many ask. Every list has a limit,",
        "so its size has one too, and nothing in it comes from a prompt or an answer. `version` grows when a field changes its",
        "meaning or goes; new fields may come without.\n",
    ]
    return "\n".join(lines + _fields("", live_document.Live)) + "\n"


def _fields(prefix: str, section: Any) -> list[str]:
    documented = _field_docs(section)
    rows: list[str] = []
    below: dict[Any, list[str]] = {}
    for field in msgspec.structs.fields(section):
        name = f"{prefix}{field.name}"
        nested = list(_sections_in(field.type))
        for step, inner in nested:
            below.setdefault(inner, []).append(f"{name}{step}")
        if field.name in documented or not nested:
            kind = _kind(field.type).replace("|", "\\|")
            rows.append(f"| `{name}` | {kind} | {documented.get(field.name, '')} |")
    lines = ["| field | type | meaning |", "|---|---|---|", *rows]
    for inner, names in below.items():
        doc = " ".join((inspect.getdoc(inner) or "").split())
        lines += [f"\n## {', '.join(f'`{name}`' for name in names)}\n", f"{doc}\n", *_fields(f"{names[0]}.", inner)]
    return lines


def errors() -> str:
    """Every code that a client can read in an answer of the filter."""
    lines = [
        _GENERATED,
        "# Errors\n",
        "Baton answers in the shape of the OpenAI API, with the content type `application/json`:\n",
        '```json\n{"error": {"message": "…", "type": "…", "param": null, "code": "…"}}\n```\n',
        "`code` is stable and counted (`baton_requests_total{outcome=…}`). A prefill worker's own 4xx, and every answer of a",
        "decode worker, reach the client as they are. Envoy's own errors have the same shape; their codes stand at",
        "`local_reply_config` in [envoy.yaml](../envoy/envoy.yaml).\n",
        "| status | code | type | when |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {k.status} | `{code}` | `{k.type}` | {k.meaning} |" for code, k in sorted(CODES.items(), key=lambda i: i[1].status)
    ]
    return "\n".join(lines) + "\n"


def requests() -> str:
    """How each path and each body is treated."""
    by_treatment = {how: sorted(path for path, found in TABLE.items() if found is how) for how in Treatment}
    lines = [_GENERATED, "# What happens to a request\n", "| path | treatment |", "|---|---|"]
    meaning = {
        Treatment.WHOLE: "one decode worker does all of it, unchanged",
        Treatment.MODELS: "answered for the whole pool, from what each worker lists",
        Treatment.REFUSED: "404: it controls the engine, or shows what others ask",
    }
    lines += [
        f"| {' '.join(f'`{path}`' for path in by_treatment[how])} | {meaning.get(how, 'prefill and decode apart')} |"
        for how in Treatment
    ]
    lines += [
        "| every other path | one decode worker does all of it, unchanged |\n",
        "## Never passed on from a client\n",
        "On every path: the keys "
        + ", ".join(f"`{key}`" for key in TRANSFER_KEYS)
        + " at the top level of a JSON body, inside",
        "`vllm_xargs` and inside `sampling_params.extra_args`, and every routing header (`extproc/headers.py`). A form with",
        "a field `vllm_xargs` is refused.\n",
        "## The prefill leg\n",
        f"The client's body with `kv_transfer_params: {NixlPull().prefill_params(Pair('', '', '')).decode()}`, and:\n",
        "| API | token cap, at 1 | set | taken out |",
        "|---|---|---|---|",
    ]
    for how, leg in LEGS.items():
        caps = " or ".join(f"`{cap}`" for cap in leg.caps)
        sets = " ".join(f"`{key}: {value.decode()}`" for key, value in leg.sets.items())
        lines.append(f"| {how.value} | {caps} | {sets} | {' '.join(f'`{key}`' for key in sorted(leg.drops))} |")
    lines += [
        "\nOf two spellings of the cap, the one that the client uses stays. With `prefill.tokenise_once`, chat and completions",
        "ask for the prompt's token ids as well (`return_token_ids`). With `handoff.next_turn`, a prefill that goes on",
        "behind a turn whose blocks a decode worker keeps carries these, and the prompt as token ids; see",
        "[the next turn](routing.md#the-next-turn).\n",
        "## The decode leg\n",
        "What the client sent, and the `kv_transfer_params` of the prefill's reply, byte for byte. With",
        "`prefill.tokenise_once`, the prompt's token ids too: in `kv_transfer_params.prompt_token_ids` (chat), or in place of",
        "`prompt` (completions). With `handoff.next_turn`, chat and completions without a stream ask for token ids; what the",
        "client did not ask for is taken out of the answer again.\n",
        "## Several engines behind one address\n",
        "`vllm serve --data-parallel-size N` is one worker with N engines, each with a cache of its own. Its own balancing",
        "takes the engine with the fewest requests, whatever that holds, but where one is named (`X-data-parallel-rank`):\n",
        "| | |",
        "|---|---|",
        *(f"| {what} | {how} |" for what, how in _RANKS.items()),
        "\nWithout events, what is predicted of a worker is taken for held by all its engines, which is too much: give each",
        "engine an address of its own then (`--data-parallel-external-lb`, or `--data-parallel-rank` for each).\n",
        "## Whole to one worker\n",
        "What one handoff cannot serve is counted in `baton_whole_requests_total` by reason:\n",
        "| reason | field | APIs |",
        "|---|---|---|",
        *(f"| `{rule.reason}` | `{key}` | {', '.join(api.value for api in rule.apis)} |" for key, rule in WHOLE_RULES),
    ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric of the filter, by topic."""
    lines = [
        _GENERATED,
        "# Metrics\n",
        "On the admin port at `/metrics`, in the Prometheus text format. Histograms have `_bucket`, `_sum` and `_count`.",
        "Labels hold names of the configuration, of workers or of a fixed set; `model` is what live workers list, else",
        "`other`, and `tenant` one of the first 100, else `other`. `-` stands where there is none. What carries `endpoint`",
        "goes with its worker. `role` is `prefill`, `decode`, or `both` where a worker does both and reports for both.\n",
        "What engines count is added from one look at their `/metrics` to the next, so it survives their restarts and begins",
        "with the filter. Where requests of other filters run on the same workers, it counts those as well.",
    ]
    topic = ""
    for entry in Metrics().entries:
        if entry.topic != topic:
            if topic == "Decisions":
                lines += _reasons()
            topic = entry.topic
            lines += [f"\n## {topic}\n", "| metric | type | labels | meaning | watch |", "|---|---|---|---|---|"]
        labels = " ".join(f"`{label}`" for label in entry.labels)
        lines.append(f"| `{entry.name}` | {entry.kind} | {labels} | {entry.meaning} | {entry.watch} |")
    return "\n".join(lines) + "\n"


def _reasons() -> list[str]:
    return [
        "\n| `mode` | `reason` | meaning |",
        "|---|---|---|",
        *(f"| `{mode}` | `{reason}` | {meaning} |" for (mode, reason), meaning in REASONS.items()),
    ]


PAGES = {
    "configuration.md": configuration,
    "errors.md": errors,
    "requests.md": requests,
    "metrics.md": metrics,
    "live.md": live,
}


def main(directory: str) -> None:
    """Write every page into ``directory``."""
    for name, page in PAGES.items():
        (Path(directory) / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
