"""The examples of routes in ``envoy/``: an API server would take them, and they let Baton set what it sets."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from extproc.headers import MODEL_HEADER, POOL_HEADER, ROUTING_HEADERS
from tests.manifests import schemas

ROOT = Path(__file__).parents[2] / "envoy"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/routes/*.yaml"))


def load(name: str) -> list[Any]:
    return list(YAML(typ="safe").load_all((ROOT / name).read_text()))


def test_there_are_those_that_the_page_names() -> None:
    page = (ROOT.parent / "docs" / "routes.md").read_text()
    assert sorted(set(re.findall(r"\.\./envoy/([a-z-]+/routes/[a-z-]+\.yaml)", page))) == FILES


@pytest.mark.parametrize("name", FILES)
def test_an_api_server_would_take_them(name: str) -> None:
    assert schemas.faults(load(name)) == []


@pytest.mark.parametrize("name", ["istio/routes/pools.yaml", "gateway/routes/models.yaml"])
def test_a_field_that_there_is_not_would_be_noticed(name: str) -> None:
    (document,) = copy.deepcopy(load(name))
    rule = document["spec"].get("http", document["spec"].get("rules"))[0]
    rule["no-such-field"] = 1
    assert schemas.faults([document])


def test_the_reader_may_set_and_remove_every_header_that_a_client_must_not_choose() -> None:
    (document,) = load("istio/routes/body-based-routing.yaml")
    filter_ = document["spec"]["configPatches"][0]["patch"]["value"]["typed_config"]
    allowed = re.compile(filter_["mutation_rules"]["allow_expression"]["regex"])
    for name in (*ROUTING_HEADERS, MODEL_HEADER, POOL_HEADER, "content-length"):
        assert allowed.fullmatch(name), name
    for name in ("authorization", "host", "x-forwarded-for", ":path", "x-tenant"):
        assert not allowed.fullmatch(name), name
