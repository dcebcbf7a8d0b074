"""LMCache's coordinator: the directory of what cache servers hold, as they report it. Its command, from typed settings.

Pure, as :mod:`workers.lmcache` is. The names are those of LMCache 0.5.6 (`lmcache/cli/commands/coordinator.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.lmcache import CHUNK_TOKENS, HASH, WORKER_ENV
from workers.spec import Command

PORT = 9300
"""LMCache's default."""

_SILENT_S = 15.0
"""A server that was not heard of for so long is gone, and with it what it held in memory. Servers speak up every 5 s
(`--coordinator-heartbeat-interval`); LMCache's default is 30 s."""

_LOOK_S = 2.0
"""How often that is looked at; LMCache's default is 10 s."""


def coordinator_command(*, host: str, port: int, chunk_tokens: int = CHUNK_TOKENS, checkpoint: Path | None = None) -> Command:
    """The command of the coordinator. Raises ValueError for a chunk that is none.

    ``chunk_tokens``: of the servers that report to it, as the hash is: it makes the keys of a prompt by itself. With
    another one it finds nothing, and says so to nobody. ``checkpoint``: the file from which it goes on after a restart.
    """
    if chunk_tokens < 16:
        raise ValueError(f"chunk_tokens: {chunk_tokens} is below 16, the smallest block")
    argv = [sys.executable, "-m", "lmcache.cli.main", "coordinator", "--host", host, "--port", str(port)]
    argv += ["--chunk-size", str(chunk_tokens), "--hash-algorithm", HASH]
    argv += ["--instance-timeout", f"{_SILENT_S:g}", "--health-check-interval", f"{_LOOK_S:g}"]
    if checkpoint is not None:
        argv += ["--checkpoint-path", str(checkpoint)]
    return Command(tuple(argv), {**WORKER_ENV, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"})
