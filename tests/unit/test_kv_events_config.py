"""The section `kv_events:`: what contradicts itself is refused, with the field named; without it nothing is loaded."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from extproc.config import Config, ConfigError, parse

WORKERS = {"prefill": ["10.0.0.1:8100"], "decode": ["10.0.0.2:8200"]}


def _config(section: dict[str, object]) -> Config:
    return parse(msgspec.json.encode({"workers": WORKERS, "kv_events": section}).decode())  # JSON is YAML


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"find": "ports"}, "kv_events.ports:"),
        ({"ports": {"decode": {"port": 5557}}}, "kv_events.ports:"),
        ({"find": "ports", "ports": {"both": {"port": 5557}}}, "kv_events.ports.both"),
        ({"find": "ports", "ports": {"decode": {"port": 0}}}, "kv_events.ports.decode.port"),
        ({"find": "ports", "ranks": 9, "ports": {"decode": {"port": 65530}}}, "kv_events.ports.decode.port"),
        ({"find": "ports", "ports": {"decode": {"port": 5557, "replay_port": 0}}}, "kv_events.ports.decode.replay_port"),
        ({"find": "ports", "ranks": 8, "ports": {"decode": {"port": 5557, "replay_port": 5560}}}, "overlap"),
        ({"ranks": 0}, "kv_events.ranks"),
        ({"max_blocks": 10}, "kv_events.max_blocks"),
        ({"max_batch_bytes": 10}, "kv_events.max_batch_bytes"),
        ({"check_interval_s": 0}, "kv_events.check_interval_s"),
        ({"replay_timeout_s": 1e9}, "kv_events.replay_timeout_s"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(section: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        _config({"enabled": True, **section})


def test_what_is_right_is_taken() -> None:
    ports = {"prefill": {"port": 5557, "replay_port": 5657}, "decode": {"port": 5557}}
    found = _config({"enabled": True, "find": "ports", "ports": ports, "ranks": 8}).kv_events
    assert found.ports["prefill"].replay_port == 5657


def test_the_filter_does_not_load_zmq_unless_it_is_wanted() -> None:
    code = "import sys, extproc.server; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=110).returncode == 0
