"""Recorded nodes: files, links and answers of commands. ``like`` takes another case and changes parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML

from workers.preflight import Ask, Model, Severity
from workers.preflight.facts import Dial
from workers.preflight.gather.gpus import QUERY
from workers.preflight.gather.ucx import NIXL_PROBE, VERSIONS
from workers.preflight.runner import Output

_FOLDER = Path(__file__).parent

MODELS = {
    "llama_8b": Model(name="8b", kv_bytes_per_token=131_072, layers=32, kv_heads=8, max_tokens=131_072),
    "llama_70b_fp8_kv": Model(name="70b", kv_bytes_per_token=163_840, layers=80, kv_heads=8, max_tokens=131_072),
}
_NAMED = {"nvidia-smi": QUERY, "nixl": NIXL_PROBE, "versions": VERSIONS}


@dataclass(frozen=True)
class RecordedRunner:
    """Answers with what was recorded; any other command is not installed."""

    outputs: Mapping[tuple[str, ...], str]
    names: frozenset[str]
    outcome: str

    def run(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Output | None:
        text = self.outputs.get(tuple(argv))
        return None if text is None else Output(0, text)

    def dial(self, host: str, port: int, *, timeout_s: float) -> Dial:
        return Dial(target=f"{host}:{port}", outcome=self.outcome)

    def addresses(self, host: str) -> frozenset[str]:
        return self.names


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    severity: Severity
    says: str = ""
    why: str = ""
    fix: str = ""


class ExpectedRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Case:
    words: str
    ask: Ask
    env: Mapping[str, str]
    files: Mapping[str, str | None]
    links: Mapping[str, str]
    runner: RecordedRunner
    verdict: Severity
    expect: Sequence[Expected]
    absent: Sequence[str] = ()
    route: ExpectedRoute | None = None

    def write(self, root: Path) -> None:
        """The tree as files below ``root``. What another case has below a path that is null here is left out."""
        gone = [path for path, text in self.files.items() if text is None]
        for path, text in self.files.items():
            if text is None or any(path == each or path.startswith(f"{each}/") for each in gone):
                continue
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        for path, target in self.links.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)


def names() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load(name: str) -> Case:
    raw = _merged(name)
    ask: dict[str, Any] = dict(raw["ask"])
    model = MODELS[raw["model"]] if "model" in raw else None
    if model is not None and "weights_gb" in raw:
        model = msgspec.structs.replace(model, weights_bytes=raw["weights_gb"] * 1e9, weights_source="stated")
    commands = {_NAMED.get(key, tuple(key.split())): text for key, text in raw.get("commands", {}).items() if text is not None}
    return Case(
        words=raw["words"],
        ask=msgspec.structs.replace(msgspec.convert(ask, Ask), model=model),
        env=raw.get("env", {}),
        files=raw["files"],
        links=raw.get("links", {}),
        runner=RecordedRunner(commands, frozenset(raw.get("addresses", ())), raw.get("dial", "refused")),
        verdict=Severity(raw["verdict"]),
        expect=msgspec.convert(raw["expect"], list[Expected]),
        absent=raw.get("absent", ()),
        route=msgspec.convert(raw["route"], ExpectedRoute) if "route" in raw else None,
    )


def _merged(name: str) -> dict[str, Any]:
    own: dict[str, Any] = YAML(typ="safe").load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if "like" not in own:
        return own
    base = _merged(own.pop("like"))
    for key in ("expect", "absent", "route"):
        base.pop(key, None)
    for key, value in own.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) and key != "route" else value
    return base
