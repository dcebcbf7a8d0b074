"""``baton preflight`` as a command: its exit status, its JSON, and what it refuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.cli_preflight import before_start, model_of
from tests.unit.preflight_nodes import load
from workers import preflight
from workers.preflight import Ask
from workers.preflight.of_worker import ask_of
from workers.spec import WorkerSpec

CONFIG = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131_072,
}


def invoke(*options: str) -> Any:
    return CliRunner().invoke(app, ["preflight", *options])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command looks at a recorded node in place of this one."""
    real = preflight.run

    def use(name: str) -> None:
        case = load(name)
        case.write(tmp_path / "root")
        monkeypatch.setattr(
            preflight,
            "run",
            lambda ask, *, measure=None: real(
                case.ask, root=tmp_path / "root", env=case.env, runner=case.runner, measure=measure
            ),
        )

    return use


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("h100_infiniband", (), 0),
        ("h100_infiniband", ("--strict",), 0),
        ("roce_without_pfc", (), 0),
        ("roce_without_pfc", ("--strict",), 1),
        ("no_peermem", (), 2),
        ("no_peermem", ("--strict",), 2),
    ],
)
def test_the_exit_status_says_how_bad_it_is(recorded: Any, name: str, options: tuple[str, ...], status: int) -> None:
    recorded(name)
    done = invoke(*options)
    assert done.exit_code == status, done.output


def test_the_table_has_the_worst_first_and_one_line_that_sums_it_up(recorded: Any) -> None:
    recorded("container_limits")
    lines = invoke().stdout.splitlines()
    assert lines[0].startswith("error")
    assert "not ready" in lines[-1]
    assert "3 errors" in lines[-1]


def test_json_has_the_documented_shape(recorded: Any) -> None:
    recorded("no_peermem")
    said = json.loads(invoke("--json").stdout)
    assert set(said) == {
        "version",
        "verdict",
        "counts",
        "findings",
        "route",
        "kv_bytes_per_token",
        "handoffs",
        "measurement",
        "identity",
    }
    assert said["version"] == 1
    assert said["verdict"] == "error"
    assert said["findings"][0] == {
        "id": "gpu.direct_rdma",
        "severity": "error",
        **{key: said["findings"][0][key] for key in ("found", "why", "fix")},
    }
    assert said["counts"]["error"] == 1
    assert said["handoffs"][0]["tokens"] == 1024
    assert said["handoffs"][0]["staged_s"] / said["handoffs"][0]["direct_s"] == pytest.approx(50 / 11)


def test_a_report_of_the_peer_is_compared(tmp_path: Path, recorded: Any) -> None:
    recorded("two_containers")
    other = tmp_path / "other.json"
    other.write_text(invoke("--json").stdout)
    assert invoke("--device", "cpu", "--peer-report", str(other)).exit_code == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--serve", "--peer", "x", "--token", "t"), "one of the two"),
        (("--peer", "10.0.0.7"), "--token"),
        (("--peer", "10.0.0.7:99999", "--token", "t"), "HOST:PORT"),
        (("--side-channel-port", "70000"), "side_channel_port"),
        (("--kv-lease", "0"), "kv_lease_s"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--peer-report", "/dev/null"), "not a report"),
    ],
)
def test_what_cannot_be_asked_is_said_and_is_status_3(options: tuple[str, ...], why: str) -> None:
    done = invoke(*options)
    assert done.exit_code == 3, done.output
    assert why in done.stderr


def test_a_measurement_that_fails_is_an_error_of_the_report_not_a_crash(recorded: Any) -> None:
    recorded("cpu_node")
    done = invoke("--device", "cpu", "--peer", "127.0.0.1:1", "--token", "t", "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 2
    assert said["findings"][0]["id"] == "peer.measured"
    assert "nobody listens there" in said["findings"][0]["found"]


def test_this_machine_is_looked_at_for_real() -> None:
    done = invoke("--device", "cpu", "--json")
    said = json.loads(done.stdout)
    found = {finding["id"]: finding for finding in said["findings"]}
    assert done.exit_code == (2 if said["verdict"] == "error" else 0)
    assert found["nixl.installed"]["severity"] == "ok"
    assert "tcp" in found["ucx.transports"]["found"], "the UCX inside the NIXL package says what it has"
    assert said["identity"]["nixl"]


def test_a_model_folder_says_what_matters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}}))
    model = model_of(tmp_path)
    assert (model.kv_bytes_per_token, model.layers, model.kv_heads) == (131_072, 32, 8)
    assert model.weights_bytes == 16_060_522_496
    assert model.max_tokens == 131_072
    assert model_of(tmp_path, kv_dtype="fp8").kv_bytes_per_token == 65_536


def test_a_latent_cache_is_whole_on_every_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    assert model_of(tmp_path / "config.json").kv_heads == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"num_hidden_layers": 2}'])
def test_a_faulty_config_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        model_of(tmp_path)


def test_the_settings_of_a_worker_are_the_question(tmp_path: Path) -> None:
    spec = WorkerSpec(
        role="decode",
        model="m",
        served_model_name="m",
        host="0.0.0.0",
        side_channel_host="10.0.0.7",
        port=8200,
        side_channel_port=5600,
        device="gpu",
        tensor_parallel_size=2,
        kv_events_port=5557,
        kv_lease_s=90,
    )
    ask = ask_of(spec)
    assert ask == Ask(
        role="decode",
        side_channel_host="10.0.0.7",
        side_channel_port=5600,
        port=8200,
        more_ports=((5557, "kv_events_port 5557, rank 0"),),
        tensor_parallel=2,
        gpus=2,
        kv_lease_s=90,
    )
    report = preflight.run(ask, root=tmp_path, env={}, runner=load("h100_infiniband").runner)
    ports = [finding.found for finding in report.findings if finding.id == "worker.port"]
    assert ports == ["HTTP port 8200 is free", "kv_events_port 5557, rank 0: port 5557 is free"]


def test_a_worker_can_be_refused_before_it_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its port is taken: the report says so, with the sizes of the cache as this worker has it (float32 on a CPU)."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = WorkerSpec(role="prefill", model=str(tmp_path), served_model_name="m", port=port, side_channel_port=port - 1)
        report = before_start(spec, {"UCX_TLS": "tcp"})
    assert report.exit_status() == 2
    assert report.kv_bytes_per_token == 262_144
    assert f"HTTP port {port} is taken" in capsys.readouterr().err
