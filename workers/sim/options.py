"""The options of the command, and the workers that they mean. No I/O here but the environment variable for the hash seed."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Any

from workers.sim import hashing
from workers.sim.core import CoreConfig
from workers.sim.engine import EngineConfig
from workers.sim.listening import ServerTls
from workers.sim.prompts import Model
from workers.sim.timing import Profile
from workers.sim.worker import WorkerOptions


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SimOptions:
    """``baton sim-engine``. Worker i of several listens on port + i, and likewise for the other ports."""

    host: str = _option("127.0.0.1", "address of the HTTP listeners")
    port: int = _option(8100, "HTTP port of the first worker; 0 gives each worker a free one")
    workers: int = _option(1, "how many workers this process runs")
    control_port: int | None = _option(None, "port of /workers/{i}/sim/... and /sim/..., which no fault closes")
    served_model_name: tuple[str, ...] = _option(("sim-llama-70b",), "names of the model; answers carry the first")
    lora_modules: tuple[str, ...] = _option((), "LoRA adapters, name=path")
    side_channel_host: str = _option("127.0.0.1", "address where other workers read this one's blocks; goes into handoffs")
    side_channel_port: int = _option(0, "side channel port of the first worker; 0 gives each a free one")
    engine_id: str | None = _option(None, "engine id (with -i for several workers); default: a random one")
    speed: float = _option(1.0, "so many times faster than the hardware profile; 0: no waiting at all")
    block_size: int = _option(16, "tokens in a KV block")
    num_blocks: int = _option(34_900, "KV blocks of a worker")
    host_cache_tokens: int = _option(0, "tokens whose KV the host's memory keeps behind the GPU's cache (OffloadingConnector)")
    max_model_len: int = _option(32_768, "tokens of prompt and answer together")
    max_num_seqs: int = _option(256, "sequences in one step")
    max_num_batched_tokens: int = _option(8192, "tokens in one step (chunked prefill)")
    max_num_queued_reqs: int | None = _option(None, "answer 503 where so many requests wait")
    max_num_queued_tokens: int | None = _option(None, "answer 503 where so many prompt tokens wait")
    enable_prefix_caching: bool = _option(True, "keep blocks for later prompts with the same start")
    kv_lease_duration_s: float = _option(30.0, "how long a finished prefill's blocks wait; wall-clock, whatever the speed")
    kv_load_failure_policy: str = _option("fail", "a pull that fails: fail (500) or recompute (200, slowly)")
    bidirectional_kv_xfer: bool = _option(False, "keep the blocks of an answer for the next turn, and read such blocks")
    decoder_kv_blocks_ttl_s: float = _option(480.0, "how long they are kept; wall-clock, whatever the speed")
    side_channel_timeout_s: float = _option(5.0, "when an unreachable prefill worker counts as gone; wall-clock")
    handshake_s: float = _option(Profile.handshake_s, "the first transfer between two engines takes so much longer")
    mean_answer_tokens: int = _option(256, "where EOS comes on average (from half to three halves of it); 0: never")
    kv_events_port: int | None = _option(None, "publish KV events (ZMQ) on this port of the first worker")
    kv_events_replay_port: int | None = _option(None, "replay KV events (ZMQ ROUTER) on this port of the first worker")
    kv_events_topic: str = _option("", "topic of the KV events")
    enable_scale_out: bool = _option(False, "serve /inference/v1/generate, which answers 403 otherwise")
    enable_prompt_tokens_details: bool = _option(False, "say in the usage how many prompt tokens were cached")
    enable_request_id_headers: bool = _option(False, "answer with the X-Request-Id header")
    enable_server_load_tracking: bool = _option(False, "/load counts; it is always 0 otherwise")
    api_key: str | None = _option(None, "what requests to the guarded paths must carry; default: $VLLM_API_KEY, if it is set")
    ssl_certfile: str | None = _option(None, "PEM: serve HTTPS with this certificate")
    ssl_keyfile: str | None = _option(None, "PEM: its key")
    ssl_ca_certs: str | None = _option(None, "PEM: authorities of clients' certificates")
    ssl_cert_reqs: int = _option(0, "2: every client must have a certificate (ssl.CERT_REQUIRED)")
    enable_ssl_refresh: bool = _option(False, "read the certificate again when it changes")
    strict_crash: bool = _option(False, "what kills vLLM kills this engine: incomplete kv_transfer_params")


def worker_options(options: SimOptions) -> list[WorkerOptions]:
    """The workers that the options mean. Raises ValueError for what cannot work."""
    if options.workers < 1:
        raise ValueError("workers: at least one")
    if options.kv_load_failure_policy not in ("fail", "recompute"):
        raise ValueError("kv_load_failure_policy: fail or recompute")
    if options.host_cache_tokens and not options.enable_prefix_caching:
        raise ValueError("host_cache_tokens: it keeps what the prefix cache has, and that is off")
    if options.host_cache_tokens and options.host_cache_tokens < options.block_size:
        raise ValueError(f"host_cache_tokens: {options.host_cache_tokens} are less than one block of {options.block_size}")
    if (options.num_blocks - 1) * options.block_size < options.max_model_len:
        raise ValueError(
            f"{options.num_blocks} blocks of {options.block_size} tokens cannot hold one request of {options.max_model_len}"
        )
    adapters = {name: path or name for name, _, path in (entry.partition("=") for entry in options.lora_modules)}
    model = Model(options.served_model_name, adapters, options.max_model_len, options.mean_answer_tokens)
    core = CoreConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        host_blocks=options.host_cache_tokens // options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.enable_prefix_caching,
        hash_seed=os.environ.get("PYTHONHASHSEED", hashing.DEFAULT_SEED),
        lease_s=options.kv_lease_duration_s,
        recompute_on_load_failure=options.kv_load_failure_policy == "recompute",
        bidirectional=options.bidirectional_kv_xfer,
        turn_ttl_s=options.decoder_kv_blocks_ttl_s,
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
    tls = None
    if options.ssl_certfile is not None:
        tls = ServerTls(
            options.ssl_certfile,
            options.ssl_keyfile,
            options.ssl_ca_certs,
            ssl.VerifyMode(options.ssl_cert_reqs),
            options.enable_ssl_refresh,
        )
    elif options.ssl_keyfile is not None or options.ssl_ca_certs is not None:
        raise ValueError("ssl_certfile: the certificate is missing")
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
                enable_server_load_tracking=options.enable_server_load_tracking,
                max_queued_requests=options.max_num_queued_reqs,
                max_queued_tokens=options.max_num_queued_tokens,
                events_endpoint=_endpoint(options.host, options.kv_events_port, index),
                events_replay_endpoint=_endpoint(options.host, options.kv_events_replay_port, index),
                events_topic=options.kv_events_topic,
                api_key=options.api_key or os.environ.get("VLLM_API_KEY") or None,
                tls=tls,
            )
        )
    return made


def _endpoint(host: str, port: int | None, index: int) -> str | None:
    """At its own address, where it has one: several may then stand on one machine. vLLM takes all addresses."""
    if port is None:
        return None
    try:
        own = "*" if IPv4Address(host).is_unspecified else host
    except ValueError:  # a name, or IPv6
        own = "*"
    return f"tcp://{own}:{port + index}"
