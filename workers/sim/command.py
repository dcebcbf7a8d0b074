"""The command line of one simulated worker, from the same description as that of a real one."""

from __future__ import annotations

import sys

from workers.vllm import Command, WorkerSpec


def command(spec: WorkerSpec) -> Command:
    """What starts it. The role makes no difference: like the real engine's, it is a matter of what a request asks for."""
    return Command(
        argv=(
            *(sys.executable, "-m", "workers.sim"),
            *("--host", spec.host, "--port", str(spec.port)),
            *("--side-channel-host", spec.host, "--side-channel-port", str(spec.side_channel_port)),
            *("--served-model-name", spec.served_model_name),
            *("--block-size", str(spec.block_size_tokens)),
            *("--kv-lease-duration-s", str(spec.kv_lease_s)),
            "--enable-prompt-tokens-details",
        ),
        env={},
    )
