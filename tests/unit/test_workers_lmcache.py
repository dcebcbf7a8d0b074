"""The cache block: what is refused, what fits a node, and that no secret is in what anybody can see."""

from __future__ import annotations

import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.cli_cache import CacheFile
from workers import cache_disk, lmcache, yaml_lines
from workers.lmcache import CacheSpec, Disk, available_bytes, connector, fit, server_command, without_secrets
from workers.lmcache_coordinator import coordinator_command

GIB = 1 << 30
MEMINFO = "MemTotal:       24684096 kB\nMemFree:        21558764 kB\nMemAvailable:   16777216 kB\n"
SECRET = "gehe1m"


def rendered(spec: CacheSpec) -> tuple[list[str], dict[str, str]]:
    command = server_command(spec, host="127.0.0.1", port=5555, http_port=8080)
    return list(command.argv), command.env


# -- what fits ---------------------------------------------------------------------------------------------------------------


def test_what_is_available_is_the_machines_or_what_its_control_group_leaves() -> None:
    assert available_bytes(MEMINFO) == 16 * GIB
    assert available_bytes(MEMINFO, str(8 * GIB), str(3 * GIB)) == 5 * GIB
    assert available_bytes(MEMINFO, str(64 * GIB), "0") == 16 * GIB
    assert available_bytes(MEMINFO, str(GIB), str(2 * GIB)) == 0
    with pytest.raises(ValueError, match="MemAvailable"):
        available_bytes("MemTotal: 1 kB\n")


@pytest.mark.parametrize(("free_gib", "dram_gb"), [(64, 32), (3, 1.5), (1.95, 0.9), (1.55, 0.5)])
def test_the_default_is_a_share_of_free_memory_and_leaves_room_for_the_server(free_gib: float, dram_gb: float) -> None:
    assert fit(CacheSpec(), memory_bytes=int(free_gib * GIB)).dram_gb == dram_gb


@pytest.mark.parametrize(
    ("spec", "memory_gib", "disk_gib", "said"),
    [
        (CacheSpec(), 1.4, None, "dram_gb"),
        (CacheSpec(dram_gb=16), 16, None, "dram_gb: 16 GiB do not fit: 16.0 GiB"),
        (CacheSpec(dram_gb=1, disk=Disk(path="/kv", gb=100)), 16, 99, "disk.gb: 100 GiB do not fit: /kv has room for 99.0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(spec: CacheSpec, memory_gib: float, disk_gib: float, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        fit(spec, memory_bytes=int(memory_gib * GIB), disk_bytes=None if disk_gib is None else int(disk_gib * GIB))


# -- the block ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cache:\n  dram: 4\n", "f.yaml:2: cache.dram: unknown field; did you mean dram_gb?"),
        ("cache:\n  disk:\n    path: /kv\n", "f.yaml:2: cache.disk.gb: this field is required"),
        ("cache:\n  disk: {path: /kv, gb: 0}\n", "f.yaml:2: cache.disk.gb: 0 is not a positive number"),
        ("cache:\n  dram_gb: 0.1\n", "f.yaml:2: cache.dram_gb: 0.1 is below 0.5"),
        (f"cache:\n  remote: rediss://u:{SECRET}@kv\n", "no TLS"),
        (f"cache:\n  remote: redis://u:{SECRET}@kv/3\n", "database 0"),
        (f"cache:\n  remote: redis://u:{SECRET}@kv:x\n", "not a URL"),
        (f"cache:\n  remote: 'redis://u:{SECRET}@'\n", "names no host"),
        (f"cache:\n  remote: lm://u:{SECRET}@kv:1\n", "not redis://"),
        ("cache:\n  remote: s3://kv.s3.eu-west-1.amazonaws.com\n", "region"),
        (f"cache:\n  remote: s3://key:{SECRET}@kv.s3.amazonaws.com?region=x\n", "environment"),
        ("cache:\n  coordinator: http://kv:9300\n", "f.yaml:2: cache.coordinator: 'http://kv:9300': not host:port"),
        ("cache:\n  name: a/b\n", "f.yaml:2: cache.name: 'a/b' is not up to 63 letters"),
    ],
)
def test_a_block_that_cannot_be_used_is_refused_with_the_reason_and_without_secrets(text: str, said: str) -> None:
    with pytest.raises(yaml_lines.FaultError) as caught:
        yaml_lines.decode(text, CacheFile, source="f.yaml")
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_command_that_is_not_sized_is_not_made() -> None:
    with pytest.raises(ValueError, match="dram_gb"):
        rendered(CacheSpec())
    with pytest.raises(ValueError, match="8080"):
        server_command(CacheSpec(dram_gb=1), host="127.0.0.1", port=8080, http_port=8080)


def test_tiers_come_in_the_order_of_their_speed() -> None:
    argv, _ = rendered(CacheSpec(dram_gb=1, disk=Disk(path="/kv", gb=10), remote="s3://b.s3.x.amazonaws.com?region=x"))
    tiers = [json.loads(value) for option, value in itertools.pairwise(argv) if option == "--l2-adapter"]
    assert [tier["type"] for tier in tiers] == ["fs_native", "s3"]


def test_only_where_workers_copy_by_themselves_the_server_unpickles() -> None:
    def mode(**changes: Any) -> str:
        argv, _ = rendered(CacheSpec(dram_gb=1, **changes))
        return argv[argv.index("--supported-transfer-mode") + 1]

    assert mode(device="gpu") == "lmcache_driven"
    assert mode(device="cpu") == mode() == "auto"


def test_a_password_goes_by_the_environment_and_is_shown_nowhere() -> None:
    url = f"redis://baton:{SECRET}%40@kv.internal:6380"
    spec = CacheSpec(dram_gb=1, remote=url)
    argv, env = rendered(spec)
    assert SECRET not in " ".join(argv)
    assert env["LMCACHE_RESP_USERNAME"] == "baton"
    assert env["LMCACHE_RESP_PASSWORD"] == f"{SECRET}@"
    assert SECRET not in repr(spec)
    assert without_secrets(url) == "redis://***@kv.internal:6380"
    assert SECRET not in without_secrets(f"redis://baton:{SECRET}@[::1")


def test_neither_the_server_nor_a_worker_reports_its_use_to_the_internet() -> None:
    assert rendered(CacheSpec(dram_gb=1))[1]["LMCACHE_TRACK_USAGE"] == "false"
    assert lmcache.WORKER_ENV["LMCACHE_TRACK_USAGE"] == "false"


def test_a_server_that_reports_does_so_under_a_name_that_stays() -> None:
    """Without one LMCache makes up a new one at each start, and the directory has its disk under the old one for good."""
    with pytest.raises(ValueError, match="name: a server that reports"):
        rendered(CacheSpec(dram_gb=1, coordinator="kv:9300"))
    argv, _ = rendered(CacheSpec(dram_gb=1, coordinator="kv:9300", name="node-1"))
    at = argv.index("--coordinator-url")
    assert argv[at:] == [
        *("--coordinator-url", "http://kv:9300", "--coordinator-event-reporting", "--instance-id", "node-1"),
        *("--coordinator-advertise-ip", "127.0.0.1"),
    ]
    spec = CacheSpec(dram_gb=1, coordinator="kv:9300", name="node-1")
    argv = list(server_command(spec, host="0.0.0.0", port=5555, http_port=8080, http_host="0.0.0.0").argv)
    assert "--coordinator-advertise-ip" not in argv, "that of the default route, which LMCache finds itself"
    assert "--coordinator-url" not in rendered(CacheSpec(dram_gb=1, name="node-1"))[0]


def test_the_coordinator_makes_keys_as_the_servers_do() -> None:
    """It would find nothing otherwise, and say nothing of it."""
    server, _ = rendered(CacheSpec(dram_gb=1))
    coordinator = list(coordinator_command(host="127.0.0.1", port=9300).argv)
    for option in ("--hash-algorithm", "--chunk-size"):
        assert server[server.index(option) + 1] == coordinator[coordinator.index(option) + 1]
    assert coordinator_command(host="127.0.0.1", port=9300).env["LMCACHE_TRACK_USAGE"] == "false"


# -- the connector -----------------------------------------------------------------------------------------------------------


def test_a_worker_waits_seconds_for_a_server_that_is_gone_not_minutes() -> None:
    for device in ("cpu", "gpu"):
        child = connector("[fd00::1]:5555", device=device)  # type: ignore[arg-type]
        extra = child["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://[fd00::1]", 5555)
        assert extra["lmcache.mp.mq_timeout"] <= 30
        assert extra["lmcache.mp.heartbeat_interval"] <= 2
        assert "engine_id" not in child, "vLLM takes none in a child of a MultiConnector"


@pytest.mark.parametrize("address", ["", "kv", "kv:", ":5555", "kv:0", "kv:65536", "kv:five", "fd00::1:5555", "kv:٥"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="cache server"):
        connector(address)


def test_the_servers_hash_is_the_connectors() -> None:
    argv, _ = rendered(CacheSpec(dram_gb=1))
    extra = connector("kv:5555")["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert argv[argv.index("--hash-algorithm") + 1] == extra["lmcache.mp.hash_algorithm"]


# -- the disk tier -----------------------------------------------------------------------------------------------------------


def test_what_earlier_runs_left_is_kept_up_to_half_of_the_tier_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        chunk = tmp_path / f"{name}.data"
        chunk.write_bytes(b"x" * 100)
        os.utime(chunk, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "notes.txt").write_text("not LMCache's")
    assert cache_disk.used_bytes(tmp_path) == 300
    left = cache_disk.trim(tmp_path, 420)
    assert (left.kept_bytes, left.removed_bytes) == (200, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle.data", "new.data", "notes.txt"]


def test_a_tier_that_is_not_there_yet_has_the_room_of_its_disk(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert cache_disk.room_bytes(folder) > 0
    assert cache_disk.trim(folder, 100) == cache_disk.Leftovers(0, 0)


# -- the command -------------------------------------------------------------------------------------------------------------


def run(*options: str, env: dict[str, str] | None = None, command: str = "cache-server") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [command, *options], env=env)
    return done.exit_code, done.stdout, done.stderr


def test_a_dry_run_is_one_line_for_a_shell_without_secrets(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(f"{SECRET}\n")
    status, out, err = run(
        *("--dram-gb", "1", "--disk", str(tmp_path / "my tier"), "--disk-gb", "1", "--dry-run"),
        *("--remote-password-file", str(password)),
        env={"BATON_CACHE_REMOTE": f"redis://u:{SECRET}@kv"},
    )
    assert status == 0
    assert out.count("\n") == 1
    assert out.startswith("env LMCACHE_TRACK_USAGE=false ")
    assert 'LMCACHE_RESP_PASSWORD="$LMCACHE_RESP_PASSWORD"' in out
    assert SECRET not in out + err
    assert not (tmp_path / "my tier").exists(), "a dry run leaves nothing behind"


def test_no_disk_and_no_password_can_be_said_with_what_a_container_always_mounts(tmp_path: Path) -> None:
    status, out, _ = run(
        *("--dram-gb", "1", "--disk", str(tmp_path), "--dry-run", "--remote-password-file", "/dev/null"),
        env={"BATON_CACHE_DISK_GB": "0", "BATON_CACHE_REMOTE": ""},
    )
    assert status == 0
    assert "--l2-adapter" not in out and "PASSWORD" not in out


def test_a_dry_run_for_a_larger_machine_says_that_it_does_not_fit_here() -> None:
    status, out, err = run("--dram-gb", "100000", "--dry-run")
    assert status == 0
    assert "--l1-size-gb 100000" in out
    assert "do not fit" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dram-gb", "100000"), "do not fit"),
        (("--disk", "/kv"), "--disk-gb"),
        (("--disk-gb", "1"), "--disk"),
        (("--device", "tpu"), "not cpu or gpu"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("--remote", f"rediss://u:{SECRET}@kv"), "TLS"),
        (("--port", "8080"), "both 8080"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_1(options: tuple[str, ...], said: str) -> None:
    status, out, err = run("--dram-gb", "0.5", *options)
    assert (status, out) == (1, "")
    assert said in err
    assert SECRET not in err
    assert "Traceback" not in err


def test_options_count_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("cache:\n  dram_gb: 2\n  device: gpu\n  remote: redis://kv\n")
    _, out, _ = run("--config", str(file), "--dram-gb", "1", "--dry-run")
    assert "--l1-size-gb 1 " in out
    assert "--supported-transfer-mode lmcache_driven" in out
    assert '"host": "kv"' in out


def test_the_block_of_a_workers_profile_is_taken_with_its_device() -> None:
    _, out, _ = run("--profile", "llama-3.3-70b-h200", "--dry-run")
    assert "--l1-size-gb 256 " in out
    assert "--supported-transfer-mode lmcache_driven" in out
    _, out, _ = run("--profile", "cpu-demo", "--dry-run")
    assert "--supported-transfer-mode auto" in out
    status, _, err = run("--profile", "nowhere")
    assert status == 1
    assert "nowhere" in err


def test_an_open_port_that_asks_nobody_is_warned_of() -> None:
    quiet = run("--dram-gb", "1", "--dry-run")[2]
    assert "warning" not in quiet
    loud = run("--dram-gb", "1", "--dry-run", "--host", "10.0.0.5", "--http-host", "0.0.0.0")[2]
    assert "--http-host 0.0.0.0: whoever reaches this port can empty" in loud
    assert "--host 10.0.0.5: whoever reaches this port can read and write" in loud


def test_a_server_is_known_by_its_machines_name_and_a_second_one_there_by_its_port_too() -> None:
    def name(*options: str) -> str:
        out = run("--dram-gb", "1", "--dry-run", "--coordinator", "kv:9300", *options)[1].split()
        return out[out.index("--instance-id") + 1]

    assert name() == socket.gethostname()
    assert name("--port", "5556") == f"{socket.gethostname()}-5556"
    assert name("--name", "node-1") == "node-1"
    status, _, err = run("--dram-gb", "1", "--dry-run", "--coordinator", "kv")
    assert status == 1
    assert "coordinator: 'kv': not host:port" in err


def test_the_coordinator_is_one_line_for_a_shell_and_an_open_port_is_warned_of(tmp_path: Path) -> None:
    status, out, err = run("--checkpoint", str(tmp_path / "d" / "c"), "--dry-run", command="cache-coordinator")
    assert (status, out.count("\n"), err) == (0, 1, "")
    assert out.rstrip().endswith(f"--checkpoint-path {tmp_path}/d/c")
    assert not (tmp_path / "d").exists(), "a dry run leaves nothing behind"
    assert "have it deleted there" in run("--host", "0.0.0.0", "--dry-run", command="cache-coordinator")[2]
    status, _, err = run("--chunk-tokens", "8", command="cache-coordinator")
    assert status == 1
    assert "chunk_tokens: 8 is below 16" in err


def test_a_changed_block_is_checked_again() -> None:
    """Options are put into the block of the file; they are no way around its checks."""
    with pytest.raises(ValueError, match="dram_gb"):
        msgspec.structs.replace(CacheSpec(), dram_gb=0.1)
