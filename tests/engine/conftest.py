"""One real system for all engine tests: two vLLM workers on CPU, the filter and Envoy, as ``baton up`` starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.openai_api import MODEL
from tests.engine.system import UP_TIMEOUT_S, System, assert_ends, start_system


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting the system counts towards the time of the first test that needs it."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(UP_TIMEOUT_S + 100))
    # These end a system of their own: before the shared one is started, as two cores do not carry both.
    first = (
        "test_up.py",
        "test_push.py",
        "test_lmcache.py",
        "test_offload.py",
        "test_kv_events.py",
        "test_next_turn.py",
        "test_preflight_nixl.py",
        "test_worker_command.py",
        "test_topology_cpu.py",
        "test_tokens.py",
    )
    items.sort(key=lambda item: 1 + (first.index(item.path.name) if item.path.name in first else 9) if item in ours else 0)


_TOOLS_TEMPLATE = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
"""Tools become part of the prompt, as with every model that knows them."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose prompts show the tools. The folder's name is the model's name in requests."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    # A process of its own, so that torch's memory is not held for the length of the run.
    code = "import sys, pathlib, workers.model; workers.model.tiny_llama(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=120)
    template = folder / "chat_template.jinja"
    template.write_text(_TOOLS_TEMPLATE + template.read_text())
    return folder


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def system(tiny_model: Path) -> Iterator[System]:
    """The shared system; its end is checked too: Ctrl-C, status 0, no process left."""
    # Not pytest's own temporary folder: a unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        running = start_system(tiny_model, Path(folder))
        try:
            yield running
            everything = running.processes()
            running.process.send_signal(signal.SIGINT)
            assert_ends(running, everything, status=0)
        finally:
            running.process.terminate()
            running.process.wait(60)


@pytest.fixture
def front_url(system: System) -> str:
    return system.front_url


@pytest.fixture
def prefill_url(system: System) -> str:
    return system.prefill_url


@pytest.fixture
def decode_url(system: System) -> str:
    return system.decode_url
