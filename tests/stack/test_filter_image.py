"""What extproc/Dockerfile makes of this tree, without a container engine: our wheel and the packages that it says it needs,
and nothing else, run by a user with no rights, in a folder that cannot be written to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from workers.process import Child
from workers.ready import free_ports, wait_ready

ROOT = Path(__file__).parents[2]
NOBODY = 65534


def closure(ours: metadata.Distribution, extras: set[str]) -> set[str]:
    """The distributions that ours needs with these extras, as installed here."""
    found: set[str] = set()
    todo = [(ours, extras)]
    while todo:
        distribution, wanted = todo.pop()
        for line in distribution.requires or []:
            need = Requirement(line)
            holds = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (wanted or {""}))
            if holds and (key := re.sub(r"[-_.]+", "-", need.name).lower()) not in found:
                found.add(key)
                todo.append((metadata.distribution(need.name), set(need.extras)))
    return found


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A folder as /opt/baton would be: readable for all, written by nobody else."""
    folder = Path(tempfile.mkdtemp(prefix="baton-image-"))
    try:
        folder.chmod(0o755)
        source, site = folder / "source", folder / "site"
        # What .dockerignore lets through.
        source.mkdir()
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        for name in ("extproc", "workers"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "Dockerfile"))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--wheel-dir",
                folder,
                source,
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
        (ours,) = metadata.distributions(path=[str(site)])
        for name in closure(ours, {"sim"}):
            for file in metadata.files(name) or []:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    target = site / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if file.size == 0:
                        target.touch()  # what is here may be another package's file of the same name: envoy/__init__.py
                    else:
                        shutil.copy(str(file.locate()), target)
        yield folder
    finally:
        shutil.rmtree(folder)


def command(image: Path, *arguments: str) -> list[str]:
    """``baton …`` with this site and no other, as a user with no rights."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # A Python under /root cannot be started by anybody else.
    python = shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin") or sys.executable
    drop = (
        f"import os, sys; os.getuid() or (os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})); "
        f"os.execv({python!r}, [{python!r}, '-S', *sys.argv[1:]])"
    )
    return [sys.executable, "-c", drop, *arguments]


def environment(image: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(image / "site"), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}


def run(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(image, *arguments),
        env=environment(image),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_command_of_the_filter_image_finds_what_it_needs(image: Path) -> None:
    for arguments in (
        ("-m", "extproc", "--version"),
        ("-m", "extproc", "envoy-config"),
        (
            "-m",
            "extproc",
            "worker",
            "--engine=sim",
            "--role=decode",
            "--profile=cpu-demo",
            "--model=sim",
            "--host=127.0.0.1",
            "--dry-run",
        ),
    ):
        done = run(image, *arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
    who = run(image, "-c", "import os, extproc; print(os.getuid(), extproc.__file__)")
    assert who.stdout.split() == [str(os.getuid() or NOBODY), f"{image}/site/extproc/__init__.py"], who.stderr


def test_nothing_of_the_filter_image_is_there_that_no_requirement_names(image: Path) -> None:
    done = run(image, "-c", "import torch")
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("picker", [False, True], ids=["filter", "endpoint picker"])
def test_the_filter_serves_as_nobody_with_nothing_that_it_may_write_to_and_its_health_check_sees_it(
    image: Path, tmp_path: Path, picker: bool
) -> None:
    grpc_port, admin_port, health_port, metrics_port, nowhere, sim_port, channel_port = free_ports(7)
    epp = (
        f"epp: {{enabled: true, health_listen: '127.0.0.1:{health_port}', metrics_listen: '127.0.0.1:{metrics_port}'}}\n"
        if picker
        else ""
    )
    config = image / "baton.yaml"
    config.write_text(
        f"workers: {{prefill: ['127.0.0.1:{nowhere}'], both: ['127.0.0.1:{sim_port}']}}\n"
        f"listen: 127.0.0.1:{grpc_port}\nadmin: 127.0.0.1:{admin_port}\ndrain: {{delay_s: 0, timeout_s: 1}}\n{epp}"
    )
    dockerfile = (ROOT / "extproc" / "Dockerfile").read_text()
    # The image's ports -> those of this test.
    ports = {9003: health_port, 9091: admin_port} if picker else {9003: admin_port, 9091: nowhere}
    check = [re.sub(r":(\d+)/", lambda found: f":{ports[int(found[1])]}/", word) for word in health_check(dockerfile)[1:]]
    argv = command(image, "-m", "extproc", "serve", "--config", str(config))
    with Child("filter", ["/usr/bin/env", "-C", "/", *argv], log=tmp_path / "filter.log", env=environment(image)) as served:
        wait_ready(served, f"http://127.0.0.1:{admin_port}/metrics", 30)
        unready = run(image, *check)
        assert unready.returncode == 1, unready.stdout
        assert '"ready": false' in unready.stdout
        worker = command(
            image,
            *("-m", "extproc", "sim-engine", "--host=127.0.0.1", f"--port={sim_port}"),
            *("--side-channel-host=127.0.0.1", f"--side-channel-port={channel_port}"),
        )
        with Child("sim", worker, log=tmp_path / "sim.log", env=environment(image)) as sim:
            wait_ready(sim, f"http://127.0.0.1:{sim_port}/health", 30)
            wait_ready(served, f"http://127.0.0.1:{admin_port}/healthz", 60)
            ready = run(image, *check)
            assert ready.returncode == 0, ready.stdout + ready.stderr
    assert served.poll() == 0, served.tail()


def health_check(dockerfile: str) -> list[str]:
    found = re.search(r"^HEALTHCHECK .*\\\n\s+CMD \[(.*)\]$", dockerfile, re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]*)"', found[1])
