"""Pictures: the same bytes from the same numbers, whatever a user's own settings, and clear words where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from extproc.pictures import BLUE, PictureError, check, picture


def draw(path: Path, height: float = 4.0) -> bytes:
    with picture(path, rows=1, columns=2) as (figure, axes):
        assert figure.axes == axes and len(axes) == 2
        axes[0].plot([1, 2], [3, height], color=BLUE, label="a line")
        axes[0].legend()
        axes[1].bar(["left", "right"], [1, 2])
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_two_pictures_of_the_same_numbers_are_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    first, second = draw(tmp_path / f"first{suffix}"), draw(tmp_path / f"second{suffix}")
    assert first == second
    assert draw(tmp_path / f"third{suffix}", height=5.0) != first


def test_no_date_and_no_release_stand_in_it_and_no_line_ends_with_a_blank(tmp_path: Path) -> None:
    text = draw(tmp_path / "picture.svg").decode()
    assert "dc:date" not in text and "Matplotlib" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_settings_of_others_change_nothing_and_are_left_as_they_were(tmp_path: Path) -> None:
    import matplotlib

    before = draw(tmp_path / "before.svg")
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "other"}):
        assert draw(tmp_path / "after.svg") == before
        assert matplotlib.rcParams["font.size"] == 30


def test_nothing_is_written_where_drawing_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), picture(tmp_path / "picture.svg") as (_, (axes,)):
        axes.plot([1 / 0])
    assert list(tmp_path.iterdir()) == []


def test_another_kind_of_file_is_refused_before_any_work() -> None:
    with pytest.raises(PictureError, match=r"picture\.jpg: the name of a picture ends with \.svg or \.png"):
        check("picture.jpg")


def test_a_folder_that_is_not_there_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="there is no such folder"):
        check(tmp_path / "nowhere" / "one.svg")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PictureError, match=r"pip install 'kv-baton\[pictures\]'"):
        check("picture.svg")
