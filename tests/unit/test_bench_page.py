"""docs/bench.md shows what `baton bench` prints, and names all of its options and all that is in its JSON."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer
from aiohttp import web

from extproc import cli
from extproc.loadgen.account import Report
from extproc.loadgen.sample import Kind
from tests.unit.test_bench_run import beside, command, texts
from tests.unit.test_bench_run import stream as answer_with

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")


def without_numbers(text: str) -> str:
    """Words in their order; where lines break depends on how long the numbers are."""
    return " ".join(re.sub(r"\d[\d,.]*", "#", text).split())


def test_the_output_on_the_page_is_in_the_words_of_today(tmp_path: Path) -> None:
    found = re.search(r"^```console\n\$ baton bench (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    assert found is not None
    options, printed = shlex.split(found[1]), found[2]

    async def cached(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        *pieces, usage = texts(body["max_tokens"])
        usage = usage.replace('"completion_tokens"', '"prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens"')
        return await answer_with(request, *pieces, usage)

    with beside(cached) as (_, base):
        address = options[0]
        changed = {
            "--picture": tmp_path / "bench.svg",
            "--stages": "100:0.1,100-200:0.3",
            "--isl": "lognormal:mean=20,cv=1,max=60",
        }
        for option, value in changed.items():
            options[options.index(option) + 1] = str(value)
        done = command(base, *options[1:], "--tokens-per-word", "1")
        assert done.exit_code == 0, done.stderr
        today = re.sub(r"^warning: .*\n?", "", done.stdout, flags=re.MULTILINE).replace(base, address)
    model = re.match(r"\S+", printed)
    assert model is not None
    assert without_numbers(today) == without_numbers(printed.replace(model[0], "the-model"))


def test_the_page_names_all_options_ends_and_fields() -> None:
    options = {
        option
        for parameter in typer.main.get_command(cli.app).commands["bench"].params  # type: ignore[attr-defined]
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }
    unnamed = {option for option in options if option not in PAGE}
    assert not unnamed
    rows = {match[1] for match in re.finditer(r"^\| (\w+) \|", PAGE, re.MULTILINE)}
    assert {kind.value for kind in Kind} - {"cancelled"} <= rows
    assert {field for field in Report.__struct_fields__ if f"`{field}`" not in PAGE} == set()
