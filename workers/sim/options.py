"""The options of the command, and the workers that they mean. No I/O here but the environment variable for the hash seed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from workers.sim import hashing
from workers.sim.core import CoreConfig
from workers.sim.engine import EngineConfig
from workers.sim.prompts import Model
from workers.sim.timing import Profile
from workers.sim.worker import WorkerOptions


@dataclass(frozen=True)
class SimOptions:
    """``baton sim-engine``. Worker i of several listens on port + i, and likewise for the other ports."""

    host: str = "127.0.0.1"
    port: int = 8100
    workers: int = 1
    control_port: int | None = None
    served_model_name: tuple[str, ...] = ("sim-llama-70b",)
    lora_modules: tuple[str, ...] = ()
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    engine_id: str | None = None
    speed: float = 1.0
    block_size: int = 16
    num_blocks: int = 34_900
    max_model_len: int = 32_768
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_prefix_caching: bool = True
    kv_lease_duration_s: float = 30.0
    kv_load_failure_policy: str = "fail"
    side_channel_timeout_s: float = 5.0
    handshake_s: float = Profile.handshake_s
    mean_answer_tokens: int = 256
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    kv_events_topic: str = ""
    enable_scale_out: bool = False
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = False
    strict_crash: bool = False


def worker_options(options: SimOptions) -> list[WorkerOptions]:
    """The workers that the options mean. Raises ValueError for what cannot work."""
    if options.workers < 1:
        raise ValueError("workers: at least one")
    if options.kv_load_failure_policy not in ("fail", "recompute"):
        raise ValueError("kv_load_failure_policy: fail or recompute")
    if (options.num_blocks - 1) * options.block_size < options.max_model_len:
        raise ValueError(
            f"{options.num_blocks} blocks of {options.block_size} tokens cannot hold one request of {options.max_model_len}"
        )
    adapters = {name: path or name for name, _, path in (entry.partition("=") for entry in options.lora_modules)}
    model = Model(options.served_model_name, adapters, options.max_model_len, options.mean_answer_tokens)
    core = CoreConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.enable_prefix_caching,
        hash_seed=os.environ.get("PYTHONHASHSEED", hashing.DEFAULT_SEED),
        lease_s=options.kv_lease_duration_s,
        recompute_on_load_failure=options.kv_load_failure_policy == "recompute",
        mean_answer_tokens=options.mean_answer_tokens,
        decode_burst_tokens=1 if options.speed > 0 else 16,
    )
    engine = EngineConfig(
        core=core,
        profile=replace(Profile(), handshake_s=options.handshake_s),
        speed=options.speed,
        side_channel_host=options.side_channel_host,
        side_channel_port=options.side_channel_port,
        side_channel_timeout_s=options.side_channel_timeout_s,
        strict_crash=options.strict_crash,
        engine_id=options.engine_id,
    )
    made = []
    for index in range(options.workers):
        port = options.side_channel_port and options.side_channel_port + index
        engine_id = options.engine_id if options.workers == 1 or options.engine_id is None else f"{options.engine_id}-{index}"
        made.append(
            WorkerOptions(
                name=f"sim-{index}",
                host=options.host,
                port=options.port and options.port + index,
                model=model,
                engine=replace(engine, side_channel_port=port, engine_id=engine_id),
                enable_scale_out=options.enable_scale_out,
                enable_prompt_tokens_details=options.enable_prompt_tokens_details,
                enable_request_id_headers=options.enable_request_id_headers,
                max_queued_requests=options.max_num_queued_reqs,
                max_queued_tokens=options.max_num_queued_tokens,
                events_endpoint=_endpoint(options.kv_events_port, index),
                events_replay_endpoint=_endpoint(options.kv_events_replay_port, index),
                events_topic=options.kv_events_topic,
            )
        )
    return made


def _endpoint(port: int | None, index: int) -> str | None:
    return None if port is None else f"tcp://*:{port + index}"
