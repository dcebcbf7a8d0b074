"""``baton up --topology``: what is refused before anything is started."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc import topology_run
from extproc.cli import app
from extproc.topology_run import TopologyOptions, run_topology

FILE = """
services:
  one:
    image: thing:1
    entrypoint: [sleep, "1"]
    profiles: [a]
  two:
    image: thing:1
    entrypoint: [sleep, "1"]
    profiles: [b]
    environment: {WHO: "$WHO"}
"""


def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = FILE, **options: object) -> tuple[int, str]:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(topology_run, "Child", started)
    monkeypatch.delenv("COMPOSE_PROFILES", raising=False)
    (tmp_path / "compose.yaml").write_text(text)
    output = io.StringIO()
    made = TopologyOptions(file=tmp_path / "compose.yaml", run_dir=tmp_path / "run", **options)  # type: ignore[arg-type]
    return run_topology(made, Console(file=output, soft_wrap=True)), output.getvalue()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "which profile? --profile is one of a, b"),
        ({"profiles": ["c"]}, "there is no profile c; there are a, b"),
        ({"profiles": ["a"], "scale": {"two": 2}}, "--scale two: no such service in this profile; there are one"),
        ({"profiles": ["a"], "scale": {"one": 0}}, "--scale one=0: between 1 and 16"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, object], said: str
) -> None:
    status, output = refusal(tmp_path, monkeypatch, **options)
    assert (status, output) == (2, f"baton up: {said}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "compose.yaml", "--port", "9000"], "--port does not go with --topology"),
        (["--topology", "compose.yaml", "--block-size", "64"], "--block-size does not go with --topology"),
        (["--topology", "compose.yaml", "--scale", "decode-sim"], "--scale decode-sim: service=number is needed"),
        (["--profile", "sim"], "--profile and --scale go with --topology"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["up", *arguments])
    assert done.exit_code == 1
    assert said in done.stderr


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    output = io.StringIO()
    assert run_topology(TopologyOptions(file=tmp_path / "none.yaml"), Console(file=output, soft_wrap=True)) == 2
    assert "none.yaml" in output.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            'entrypoint: [sleep, "1"]\n    profiles: [a]',
            "profiles: [a]",
            "services.one.image: what thing:1 starts",
        ),
        ("profiles: [a]", "profiles: [a]\n    volumes: ['./gone:/x']", "services.one.volumes: "),
        ("image: thing:1", "image: grafana/grafana:1\n    depends_on: {}", "left out: one (Grafana is not run as a process)"),
    ],
)
def test_a_service_that_cannot_be_run_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    _, output = refusal(tmp_path, monkeypatch, FILE.replace(before, after, 1), profiles=["a"], once=True)
    assert said in output


def test_what_needs_a_service_that_is_left_out_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FILE.replace("image: thing:1", "image: grafana/grafana:1", 1).replace("[b]", "[a]\n    depends_on: {one: {}}")
    status, output = refusal(tmp_path, monkeypatch, text, profiles=["a"])
    assert status == 1
    assert "two needs one, which is left out: Grafana is not run as a process" in output


def test_variables_come_from_the_env_file_and_from_the_environment_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("WHO=file\nOTHER=file\n")
    monkeypatch.setenv("WHO", "here")
    found = topology_run.environment(tmp_path / "compose.yaml")
    assert (found["WHO"], found["OTHER"]) == ("here", "file")
