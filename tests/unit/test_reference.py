"""What is generated is in step with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.errors import CODES
from extproc.reference import PAGES, configuration, errors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run `make generate`"


def test_every_field_of_the_configuration_has_its_meaning_beside_it() -> None:
    rows = [line for line in configuration().splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_code_is_documented() -> None:
    assert all(f"`{code}`" in errors() for code in CODES)
