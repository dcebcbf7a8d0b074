"""compose.yaml itself: Docker Compose accepts it, every knob is written down, and what must not be reachable is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from extproc import config, topology
from extproc.topology_env import parse_env
from extproc.topology_site import Site

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
PROFILES = ["gpu", "cpu", "sim"]


def docker_compose(*arguments: str, **env: str) -> str:
    """What Docker Compose itself says; it needs no engine for this."""
    done = subprocess.run(
        [Path(sys.executable).parent / "docker-compose", "-f", COMPOSE, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    return done.stdout


@cache
def resolved(profile: str) -> dict[str, Any]:
    return json.loads(docker_compose("--env-file", str(ROOT / ".env.example"), "--profile", profile, "config", "--format=json"))


def our_env() -> dict[str, str]:
    return parse_env((ROOT / ".env.example").read_text(), source=".env.example")


@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_accepts_each_profile(profile: str) -> None:
    assert {"envoy", "filter", "prometheus", "grafana"} <= set(resolved(profile)["services"])


def test_a_profile_starts_its_own_workers_and_no_others() -> None:
    everywhere = {"envoy-config", "filter", "envoy", "prometheus", "grafana"}
    own = {
        "gpu": {"model", "lmcache", "prefill", "decode"},
        "cpu": {"lmcache-cpu", "prefill-cpu", "decode-cpu"},
        "sim": {"prefill-sim", "decode-sim"},
    }
    for profile in PROFILES:
        assert set(resolved(profile)["services"]) == everywhere | own[profile]


def test_the_example_starts_the_gpu_stack_and_a_profile_on_the_command_line_takes_its_place() -> None:
    by_default = docker_compose("--env-file", str(ROOT / ".env.example"), "config", "--services")
    assert {"prefill", "decode"} <= set(by_default.split())
    other = docker_compose("--env-file", str(ROOT / ".env.example"), "--profile", "sim", "config", "--services")
    assert "prefill-sim" in other.split()
    assert "prefill" not in other.split()


def test_every_variable_is_in_the_example_with_the_same_default_and_the_other_way_round() -> None:
    text = "\n".join(line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#"))
    used = set(re.findall(r"(?<!\$)\$\{?(\w+)", text))
    assert used | {"COMPOSE_PROFILES"} == set(our_env())
    defaults = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", text))
    assert {name: value for name, value in our_env().items() if name in used} == defaults


@pytest.mark.parametrize("profile", PROFILES)
def test_our_reader_understands_what_docker_compose_does(profile: str) -> None:
    ours = topology.in_use(topology.parse(COMPOSE.read_text(), our_env(), source="compose.yaml"), [profile])
    theirs = resolved(profile)["services"]
    assert set(ours) == set(theirs)
    for name, service in ours.items():
        other = theirs[name]
        # It writes $ as $$, so that what it prints can be read as a compose file again.
        dollars = [word.replace("$", "$$") for word in service.command]
        assert (dollars or None) == (other.get("command") or None), name
        assert service.environment == other.get("environment", {}), name
        assert set(service.depends_on) & set(ours) == set(other.get("depends_on", {})) & set(ours), name
        assert set(service.networks) == set(other.get("networks", {})), name
        assert service.secrets == [secret["source"] for secret in other.get("secrets", [])], name


@pytest.mark.parametrize("profile", PROFILES)
def test_only_envoy_is_published_and_every_other_port_is_on_loopback(profile: str) -> None:
    for name, service in resolved(profile)["services"].items():
        for port in service.get("ports", []):
            assert name == "envoy" or port["host_ip"] == "127.0.0.1", f"{name} publishes {port}"
        assert service.get("network_mode") in (None, "none"), f"{name} would be on the machine's own network"


@pytest.mark.parametrize("profile", PROFILES)
def test_side_channels_are_on_an_internal_network_that_only_workers_and_the_cache_are_on(profile: str) -> None:
    file = resolved(profile)
    assert file["networks"]["kv"]["internal"] is True
    assert file["networks"]["serving"]["internal"] is True
    on_kv = {name for name, service in file["services"].items() if "kv" in service.get("networks", {})}
    assert on_kv == {name for name in file["services"] if name.startswith(("prefill", "decode", "lmcache"))}
    for name in on_kv:
        assert set(file["services"][name]["networks"]) == {"kv", "serving"}, f"{name} has a way out"
        assert not file["services"][name].get("ports"), f"{name} publishes a port"
    assert [name for name, service in file["services"].items() if "public" in service.get("networks", {})] == ["envoy"]


def test_secrets_are_files_and_only_who_needs_one_has_it() -> None:
    file = resolved("gpu")
    holders = {
        secret: {
            name
            for name, service in file["services"].items()
            if secret in [each["source"] for each in service.get("secrets", [])]
        }
        for secret in file["secrets"]
    }
    assert holders == {"hf_token": {"model"}, "cache_password": {"lmcache"}, "grafana_password": {"grafana"}}
    for profile in PROFILES:
        for name, service in resolved(profile)["services"].items():
            for key, value in (service.get("environment") or {}).items():
                secret = any(word in key.upper() for word in ("TOKEN", "PASSWORD", "SECRET", "KEY"))
                assert not secret or value.startswith("/run/secrets/"), f"{name}: {key} is not a file"


@pytest.mark.parametrize("profile", PROFILES)
def test_each_starts_after_what_it_needs_is_healthy(profile: str) -> None:
    services = resolved(profile)["services"]
    workers = [name for name in services if name.startswith(("prefill", "decode"))]
    needs = services["filter"]["depends_on"]
    assert {name: needs[name]["condition"] for name in workers} == dict.fromkeys(workers, "service_healthy")
    assert services["envoy"]["depends_on"]["filter"]["condition"] == "service_healthy"
    assert services["envoy"]["depends_on"]["envoy-config"]["condition"] == "service_completed_successfully"
    for name in workers:
        if profile != "sim" and name.startswith("prefill"):
            cache_server = next(other for other in services if other.startswith("lmcache"))
            assert services[name]["depends_on"][cache_server]["condition"] == "service_healthy"
    for name, service in services.items():
        assert name in ("envoy-config", "model") or "healthcheck" in service, f"{name} has no health check"


def test_containers_stop_later_than_what_is_in_them_has_drained() -> None:
    drain = config.load(ROOT / "compose" / "baton.yaml").drain
    services = topology.parse(COMPOSE.read_text(), {}, source="compose.yaml").services
    assert topology.seconds(services["filter"].stop_grace_period) > drain.delay_s + drain.timeout_s
    # Envoy knows no drain at SIGTERM: it is made to wait before.
    assert float(services["envoy"].pre_stop[0].command[-1]) >= drain.timeout_s


def test_the_lease_of_the_filter_is_the_one_that_workers_are_started_with() -> None:
    lease_s = config.load(ROOT / "compose" / "baton.yaml").handoff.lease_s
    services = topology.parse(COMPOSE.read_text(), {}, source="compose.yaml").services
    for name, service in services.items():
        if name.startswith(("prefill", "decode")):
            assert f"--lease={lease_s:.0f}" in service.command, name


def test_images_of_others_are_pinned_to_a_version() -> None:
    for profile in PROFILES:
        for name, service in resolved(profile)["services"].items():
            tag = service["image"].rpartition(":")[2]
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{name}: {service['image']}"


@pytest.mark.parametrize("profile", PROFILES)
def test_nobody_can_do_more_than_the_docs_say(profile: str) -> None:
    for name, service in resolved(profile)["services"].items():
        engines = profile != "sim" and name.startswith(("prefill", "decode", "lmcache", "model"))
        assert service.get("read_only", False) is not engines, f"{name}: root file system"
        assert service["cap_drop"] == ["ALL"], name
        pins = profile == "gpu" and name in ("prefill", "decode", "lmcache")
        assert service.get("cap_add", []) == (["IPC_LOCK"] if pins else []), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged", False), name


def test_rdma_devices_are_passed_on_where_they_are_named() -> None:
    env_file = str(ROOT / ".env.example")
    file = json.loads(
        docker_compose("--env-file", env_file, "--profile", "gpu", "config", "--format=json", RDMA_DEVICES="/dev/infiniband")
    )
    for name in ("prefill", "decode"):
        (device,) = file["services"][name]["devices"]
        assert (device["source"], device["target"]) == ("/dev/infiniband", "/dev/infiniband")
        (device,) = resolved("gpu")["services"][name]["devices"]
        assert device["source"] == "/dev/null"


def test_gpu_workers_may_pin_memory_and_see_every_gpu() -> None:
    for name in ("prefill", "decode"):
        service = resolved("gpu")["services"][name]
        assert service["cap_add"] == ["IPC_LOCK"]
        assert service["ulimits"]["memlock"] == -1
        assert (service["ipc"], service["pid"]) == ("host", "host")
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["0,1"]
    assert resolved("gpu")["services"]["prefill"]["environment"]["BATON_DEVICE_IDS"] == "0"
    assert resolved("gpu")["services"]["decode"]["environment"]["BATON_DEVICE_IDS"] == "1"


def rendered(profile: str, service: str) -> str:
    """The command that `baton worker` makes of what a service tells it, at an address of this machine."""
    found = topology.in_use(topology.parse(COMPOSE.read_text(), our_env(), source="compose.yaml"), [profile])[service]
    site = Site("127.0.0.9", {}, [], topology.parse(COMPOSE.read_text(), {}, source="compose.yaml").subnets)
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "worker", *found.command, "--dry-run"],
        env={"PATH": os.environ["PATH"], **{key: site.text(value) for key, value in found.environment.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_workers_get_the_commands_of_a_pair_that_fits_together() -> None:
    prefill, decode = rendered("gpu", "prefill"), rendered("gpu", "decode")
    for command in (prefill, decode):
        assert '"kv_lease_duration": 120' in command
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.9" in command, "not the worker's own address on the KV network"
        assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in command
        assert "--port 8100" in command
    assert "LMCacheMPConnector" in prefill
    assert "tcp://lmcache" in prefill
    assert "LMCacheMPConnector" not in decode
    assert "--device-ids 0" in prefill
    assert "--device-ids 1" in decode
