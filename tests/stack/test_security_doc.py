"""The commands and the configuration of docs/security.md, as they stand there, in the real Envoy."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from ruamel.yaml import YAML

from extproc.config import parse
from tests.certificates import Pair
from tests.stack.harness import Stack
from workers.ready import free_ports

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def block(kind: str, word: str) -> str:
    """The fenced block with this word in it."""
    (found,) = [text for text in re.findall(rf"```{kind}\n(.*?)```", DOCUMENT, re.DOTALL) if word in text]
    return found


async def test_the_recipe_gives_mtls_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", block("sh", "openssl req")], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + (folder / "openssl.log").read_text()
    assert done.stdout.strip() == "workers.pem: OK"
    (port,) = free_ports(1)
    text = (
        block("yaml", "extproc_tls").replace("/etc/baton/tls", str(folder)).replace("/etc/baton/envoy", str(tmp_path / "sds"))
    )
    sections = YAML(typ="safe").load(text.replace("0.0.0.0:9002", f"127.0.0.1:{port}"))
    stack = Stack(settings=sections)
    for worker in (*stack.prefill, *stack.decode):
        worker.tls = Pair(folder / "workers.pem", folder / "workers.key").server(clients=folder / "ca.pem")
    async with stack, asyncio.timeout(30):
        while True:
            async with stack.http.post("/v1/completions", json={"model": "m", "prompt": "x" * 40}) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.05)
        assert stack.prefill[0].received and stack.decode_received
        for worker in (*stack.prefill, *stack.decode):
            assert set(worker.named) == {"baton"}


def test_the_example_of_keys_is_a_configuration() -> None:
    """With the workers that the example leaves out."""
    text = block("yaml", "api_keys:").replace("workers:\n", 'workers:\n  prefill: ["10.0.0.1:80"]\n  decode: ["10.0.0.2:80"]\n')
    made = parse(text)
    assert made.envoy.api_keys is not None
    assert made.policies[0].tenant_header == made.envoy.api_keys.client_header
