"""Endpoint files: what Envoy reads, and that it never reads half of one."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse

from extproc import xds


def addresses(file: Path) -> list[tuple[str, int]]:
    [assignment] = json.loads(file.read_text())["resources"]
    found = [
        target["endpoint"]["address"]["socket_address"]
        for locality in assignment.get("endpoints", [])
        for target in locality["lb_endpoints"]
    ]
    return [(address["address"], address["port_value"]) for address in found]


def test_endpoints_are_written_as_envoy_reads_them(tmp_path: Path) -> None:
    xds.write_endpoints(tmp_path / "eds", "decode", ["127.0.0.1:8100", "[::1]:8101"])
    file = xds.endpoints_file(tmp_path / "eds", "decode")
    assert file == tmp_path / "eds" / "decode.json"
    assert json.loads(file.read_text())["resources"][0]["@type"] == (
        "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    )
    assert json.loads(file.read_text())["resources"][0]["cluster_name"] == "decode"
    assert addresses(file) == [("127.0.0.1", 8100), ("::1", 8101)]


def test_no_endpoints_is_a_cluster_that_serves_nobody(tmp_path: Path) -> None:
    xds.write_endpoints(tmp_path, "decode", [])
    assert addresses(tmp_path / "decode.json") == []


def test_same_endpoints_give_same_bytes(tmp_path: Path) -> None:
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100"])
    first = (tmp_path / "decode.json").read_bytes()
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100", "127.0.0.1:8101"])
    second = (tmp_path / "decode.json").read_bytes()
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100"])
    assert (tmp_path / "decode.json").read_bytes() == first
    assert json.loads(first)["version_info"] != json.loads(second)["version_info"]


def test_envoy_sees_a_rename_of_a_complete_file_in_the_watched_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames: list[tuple[Path, Path]] = []
    replace = Path.replace

    def watched(source: Path, target: Path) -> Path:
        assert addresses(source) == [("127.0.0.1", 8100)]
        renames.append((source, target))
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", watched)
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100"])
    [(source, target)] = renames
    assert source.parent == tmp_path
    assert target == tmp_path / "decode.json"


def test_another_user_can_read_the_file(tmp_path: Path) -> None:
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100"])
    assert stat.S_IMODE((tmp_path / "decode.json").stat().st_mode) == 0o644


def test_failed_write_keeps_the_old_endpoints_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8100"])

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        xds.write_endpoints(tmp_path, "decode", ["127.0.0.1:8200"])
    assert [file.name for file in tmp_path.iterdir()] == ["decode.json"]
    assert addresses(tmp_path / "decode.json") == [("127.0.0.1", 8100)]


@pytest.mark.parametrize(
    "endpoints", [[], ["127.0.0.1:8100"], [f"10.0.{i % 7}.{i % 250}:{1 + 60 * i}" for i in range(1000)] + ["[fd00::1]:1"]]
)
def test_file_and_stream_say_the_same_as_the_typed_message(endpoints: list[str]) -> None:
    made = xds.assignment("decode", endpoints)
    typed = ClusterLoadAssignment.parse(made.encoded)
    assert bytes(typed) == made.encoded
    found = [target.endpoint.address.socket_address for locality in typed.endpoints for target in locality.lb_endpoints]
    assert [f"{'[' * (':' in s.address)}{s.address}{']' * (':' in s.address)}:{s.port_value}" for s in found] == endpoints
    from_file = DiscoveryResponse.from_json(xds.endpoints_json("decode", endpoints))
    assert from_file.version_info == made.version
    assert from_file.resources[0].unpack() == typed


def test_version_changes_with_the_endpoints_and_the_cluster_only() -> None:
    first = xds.assignment("decode", ["10.0.0.1:1"])
    assert xds.assignment("decode", ["10.0.0.1:1"]).version == first.version
    assert xds.assignment("decode", ["10.0.0.2:1"]).version != first.version
    assert xds.assignment("prefill", ["10.0.0.1:1"]).version != first.version
