"""What is generated is in step with the code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from extproc.config import Config
from extproc.errors import CODES
from extproc.observe.logs import make_logger
from extproc.reference import PAGES, configuration, errors, live, metrics
from extproc.server import Server

CONFIG = {"workers": {"prefill": ["10.0.0.1:1"], "decode": ["10.0.0.2:1"]}, "cache_servers": ["10.0.0.3:8080"]}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run `make generate`"


def test_every_field_of_the_configuration_has_its_meaning_beside_it() -> None:
    rows = [line for line in configuration().splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_field_of_the_live_document_has_its_meaning_beside_it() -> None:
    rows = [line for line in live().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_code_is_documented() -> None:
    assert all(f"`{code}`" in errors() for code in CODES)


def test_every_metric_of_a_running_filter_is_documented() -> None:
    registry = Server(msgspec.convert(CONFIG, Config), make_logger("critical"))._metrics.registry
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    assert len(names) > 70
    assert {name for name in names if f"| `{name}` |" not in metrics()} == set()
