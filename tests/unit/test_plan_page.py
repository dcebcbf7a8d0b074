"""docs/plan.md says what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import app

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(
    r"^```console\n\$ baton (.*)\n((?:.*\n)*?)```$", (DOCS / "plan.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_the_page_has_an_output_of_each_command() -> None:
    assert {tuple(command.split()[:2]) for command, _ in BLOCKS} == {("plan", "kv"), ("plan", "roofline")}
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_prints_what_the_page_shows(command: str, printed: str, tmp_path: Path) -> None:
    picture = re.search(r"--picture (\S+)", command)
    if picture is not None:
        command = command.replace(picture[1], str(tmp_path / "picture.svg"))
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    assert (done.exit_code, done.stdout.rstrip()) == (0, printed.rstrip())
    if picture is not None:
        committed = (DOCS.parent / picture[1]).read_bytes()
        assert (tmp_path / "picture.svg").read_bytes() == committed, "make the picture again"
