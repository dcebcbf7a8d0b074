"""The command line of one simulated worker, from the same description as that of a real one."""

from __future__ import annotations

import sys

from workers.spec import Command, WorkerSpec, ports, ssl_flags


def command(spec: WorkerSpec) -> Command:
    """What starts it. The role makes no difference: like the real engine's, it is a matter of what a request asks for.

    ``extra_args`` are options of ``baton sim-engine``. What only hardware has (parallelism, GPU memory, transports) means
    nothing to it. Raises ValueError where two listeners want one port, or half of a certificate is given.
    """
    ports(spec)
    argv = [sys.executable, "-m", "workers.sim"]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--side-channel-host", spec.peer_host, "--side-channel-port", str(spec.side_channel_port)]
    argv += ["--served-model-name", spec.served_model_name]
    argv += ["--block-size", str(spec.block_size_tokens)]
    argv += ["--kv-lease-duration-s", str(spec.kv_lease_s)]
    argv += ["--enable-prompt-tokens-details"]
    for flag, value in (
        ("--max-model-len", spec.max_model_len_tokens),
        ("--max-num-seqs", spec.max_num_seqs),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
        ("--max-num-queued-reqs", spec.max_num_queued_reqs),
        ("--max-num-queued-tokens", spec.max_num_queued_tokens),
        ("--kv-load-failure-policy", spec.kv_load_failure_policy),
        ("--kv-events-port", spec.kv_events_port),
        ("--kv-events-replay-port", spec.kv_events_replay_port),
        ("--kv-events-topic", spec.kv_events_topic or None),
        ("--decoder-kv-blocks-ttl-s", spec.decoder_kv_blocks_ttl_s),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if spec.bidirectional_kv_xfer:
        argv += ["--bidirectional-kv-xfer"]
    argv += ssl_flags(spec)
    if spec.prefix_caching is False:
        argv += ["--no-enable-prefix-caching"]
    env = {} if spec.hash_seed is None else {"PYTHONHASHSEED": str(spec.hash_seed)}
    return Command(argv=(*argv, *spec.extra_args), env=env | dict(spec.env))
