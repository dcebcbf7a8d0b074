"""Whether an API server would take an object: published schemas where one can be had, our own list of fields elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from ruamel.yaml import YAML

from tests.manifests.helm import Object

KUBERNETES = "1.34"
"""The release whose schemas are used."""

_WORDS = {
    "string": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    # Of the Gateway API (GEP-2257).
    "duration": {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "quantity": {"type": ["string", "integer"], "pattern": r"^[1-9]+[0-9]*([EPTGMK]i|[EPTGMk])?$"},
    "any": {},
}
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?")


def faults(objects: list[Object]) -> list[str]:
    """Why not, of each of them; nothing: it would."""
    found = []
    for each, said in zip(objects, published(objects), strict=True):
        kind, name = each["kind"], each["metadata"]["name"]
        if _NAME.fullmatch(name) is None:
            found.append(f"{kind}: {name!r} is no name")
        found += [f"{kind} {name}: {fault}" for fault in (*_faults(each), *said)]
    return found


def _faults(of: Object) -> Iterator[str]:
    fields = _own().get(of["kind"])
    if fields is None:
        yield from _kubernetes(of)
        return
    for error in jsonschema.Draft202012Validator(fields).iter_errors(of):
        yield f"{error.json_path}: {error.message}"
    if of["kind"] == "LeaderWorkerSet":
        template = of["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        yield from _kubernetes({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})


def published(objects: list[Object]) -> list[list[str]]:
    """What the published validators of custom resources say: JavaScript, which Node runs."""
    environment = Path(sys.prefix)
    judge = Path(__file__).parent / "published" / "judge.mjs"
    done = subprocess.run(
        [environment / "bin" / "node", judge, environment / "published"],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [said or [] for said in json.loads(done.stdout)]


def _kubernetes(of: Object) -> tuple[str, ...]:
    return _kubernetes_says(json.dumps(of))


@cache
def _kubernetes_says(of: str) -> tuple[str, ...]:
    """The library reads its files anew for each object; many are made the same in every set of values."""
    try:
        kubernetes_validate.validate(json.loads(of), KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return (str(error),)
    return ()


@cache
def _own() -> dict[str, dict[str, Any]]:
    with (Path(__file__).parent / "fields.yaml").open(encoding="utf-8") as file:
        kinds = YAML(typ="safe", pure=True).load(file)
    return {
        kind: _object({"apiVersion!": fields["apiVersion"], "kind!": kind, "metadata!": "any", "spec!": fields["spec"]})
        for kind, fields in kinds.items()
    }


def _schema(fields: Any) -> dict[str, Any]:
    if isinstance(fields, dict):
        return _object(fields)
    if isinstance(fields, list):
        return {"type": "array", "items": _schema(fields[0])}
    return _WORDS[fields] if fields in _WORDS else {"enum": fields.split("|")}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name.removesuffix("!") for name in fields if name.endswith("!")],
        "properties": {name.removesuffix("!"): _schema(inner) for name, inner in fields.items()},
    }
