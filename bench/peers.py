"""The peers that Baton is compared with: where they are installed, and the commands that start them for prefill and decode."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_HOST = "127.0.0.1"


class MissingPeerError(RuntimeError):
    """A peer is not installed; the message says how to install it."""


def default_peers() -> Path:
    """Where `make bench-peers` installs them: beside this file, in a virtual environment of their own."""
    return Path(os.environ.get("BENCH_PEERS", Path(__file__).parent / ".venv"))


def peer(peers: Path, name: str) -> str:
    """The path of a peer's program. Raises MissingPeerError."""
    binary = peers / "bin" / name
    if not binary.is_file():
        raise MissingPeerError(f"{binary} is not there: install the peers with `make bench-peers`")
    return str(binary)


def vllm_router_command(
    peers: Path,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    port: int,
    metrics_port: int,
    patience_s: int,
    options: Sequence[str] = (),
    publishers: Mapping[str, str] | None = None,
) -> list[str]:
    """What starts vllm-router for workers with a NixlConnector; ready when `/health` answers. Raises MissingPeerError.

    ``publishers``: worker -> where it publishes KV events, for those that prefill. It wants blocks of 16 tokens then, and
    `VLLM_ROUTER_TOKENIZER`, the folder of the model's tokenizer.
    """
    told = publishers or {}
    heard = [part for each in prefill if each in told for part in ("--pd-kv-events", f"http://{each}={told[each]}")]
    return [
        *(peer(peers, "vllm-router"), "--host", _HOST, "--port", str(port)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
        *(part for address in prefill for part in ("--prefill", f"http://{address}")),
        *(part for address in decode for part in ("--decode", f"http://{address}")),
        *("--policy", "kv_aware" if heard else "cache_aware", "--decode-policy", "power_of_two", *heard),
        *("--prometheus-host", _HOST, "--prometheus-port", str(metrics_port)),
        *("--queue-size", "100000", "--queue-timeout-secs", str(patience_s)),
        *("--request-timeout-secs", str(patience_s), "--worker-startup-check-interval", "1", "--log-level", "error"),
        *options,
    ]


def smg_command(
    peers: Path,
    directory: Path,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    port: int,
    metrics_port: int,
    patience_s: int,
    load_interval_s: int = 10,
    options: Sequence[str] = (),
) -> list[str]:
    """What starts SMG for workers with a NixlConnector; ready when `/readiness` answers. Raises MissingPeerError, OSError.

    Only a list of workers in a file says which KV connector they have; named on the command line they would get none, and
    every decode worker would compute the whole prompt again. The file is written into ``directory``.
    """
    workers = directory / "smg-workers.json"
    listed = [
        {
            "id": address,
            "url": f"http://{address}",
            "worker_type": role,
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }
        for role, addresses in (("prefill", prefill), ("decode", decode))
        for address in addresses
    ]
    workers.write_bytes(msgspec.json.encode({"version": 1, "workers": listed}))
    return [
        *(peer(peers, "smg"), "launch", "--host", _HOST, "--port", str(port)),
        *("--pd-disaggregation", "--backend", "vllm", "--disable-tokenizer-autoload"),
        *("--discovery-provider", "file", "--discovery-file", str(workers)),
        *("--policy", "cache_aware", "--decode-policy", "power_of_two"),
        *("--prometheus-host", _HOST, "--prometheus-port", str(metrics_port)),
        *("--load-monitor-interval", str(load_interval_s)),
        *("--max-concurrent-requests", "0", "--request-timeout-secs", str(patience_s), "--sse-keepalive-secs", "0"),
        *("--log-level", "error", *options),
    ]
