"""A compose file as processes, for tests: ``baton up --topology`` under guard, where its services are, and a question to it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from workers.process import Child

ROOT = Path(__file__).parents[2]


class Topology:
    """``baton up --topology`` as a process, and where its services are."""

    def __init__(self, child: Child, run_dir: Path) -> None:
        self.child = child
        self.run_dir = run_dir

    @property
    def output(self) -> str:
        return self.child.log.read_text()

    def url(self, service: str) -> str:
        found = re.search(rf"^{service}: (http://\S+) ", self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]

    async def until_up(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while "\nUp. Ctrl-C ends it all." not in self.output:
                assert self.child.poll() is None, self.output
                await asyncio.sleep(0.1)

    def requests(self) -> list[dict[str, Any]]:
        """The filter's log lines about requests."""
        lines = (self.run_dir / "filter.log").read_text().splitlines()
        return [entry for entry in (json.loads(line) for line in lines if line.startswith("{")) if "request_id" in entry]


@contextmanager
def topology(
    run_dir: Path, *arguments: str, file: Path = ROOT / "compose.yaml", env: Mapping[str, str] | None = None
) -> Iterator[Topology]:
    argv = [sys.executable, "-m", "extproc", "up", "--topology", str(file), "--run-dir", str(run_dir), *arguments]
    run_dir.mkdir(parents=True, exist_ok=True)
    with Child("topology", argv, log=run_dir / "output", env=env, grace_s=60) as child:
        yield Topology(child, run_dir)


async def chat(url: str, model: str, prompt: str, max_tokens: int = 8) -> dict[str, Any]:
    """The answer to a prompt that is handed over, however short."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=90)
    headers = {"x-baton-mode": "disaggregate"}
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return dict(answer)
