"""The three arrangements: which workers each has, and what they run on. Pure but for free ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bench.interference.load import Load
from workers import cores, vllm
from workers.ready import free_ports
from workers.sim import command as sim
from workers.spec import Command, Device, WorkerSpec

Engine = Literal["vllm", "sim"]

COLOCATED, CHUNKED, APART = "colocated", "chunked", "apart"
ARRANGEMENTS = (COLOCATED, CHUNKED, APART)
TITLES = {
    COLOCATED: "colocated, prompts whole",
    CHUNKED: "colocated, chunked prefill",
    APART: "prefill/decode, Baton",
}

_MODEL_LEN_STEP_TOKENS = 256
_SIM_MODEL = "sim-llama-70b"
_GPUS = 2


@dataclass(frozen=True)
class Worker:
    """One engine to start."""

    name: str
    spec: WorkerSpec
    command: Command
    cores: tuple[int, ...]
    """Empty: it is not pinned."""


@dataclass(frozen=True)
class Arrangement:
    """What is compared."""

    name: str
    workers: tuple[Worker, ...]
    described: str
    """What it runs on."""

    @property
    def apart(self) -> bool:
        """Prefill and decode workers, with Envoy and the filter before them."""
        return self.name == APART


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arrangements have in common."""

    engine: Engine
    device: Device
    model: str
    served_model_name: str
    local_model: bool
    cores: Sequence[int]
    """CPU only: those that workers may use."""


def arrangement(name: str, setting: Setting, load: Load) -> Arrangement:
    """One of :data:`ARRANGEMENTS`, with ports of its own."""
    seqs = 2 * load.streams + load.prompts + 2
    model_len_tokens = -(-(load.longest_tokens + 1) // _MODEL_LEN_STEP_TOKENS) * _MODEL_LEN_STEP_TOKENS
    whole_tokens = model_len_tokens + seqs
    """A step in which the longest prompt and all streams have room."""
    roles: tuple[vllm.Role, ...] = ("prefill", "decode") if name == APART else ("decode",)
    ports = free_ports(2 * len(roles))
    pinned = setting.engine == "vllm" and setting.device == "cpu"
    shares = cores.spread(len(roles), setting.cores) if pinned else [()] * len(roles)
    workers = []
    for index, (role, share) in enumerate(zip(roles, shares, strict=True)):
        spec = WorkerSpec(
            role=role,
            model=setting.model,
            local_model=setting.local_model,
            served_model_name=setting.served_model_name,
            port=ports[2 * index],
            side_channel_port=ports[2 * index + 1],
            device=setting.device,
            block_size_tokens=128 if setting.engine == "vllm" else 16,
            max_model_len_tokens=model_len_tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(load.chunk_tokens, seqs) if name == CHUNKED else whole_tokens,
            threads=max(1, len(share)),
        )
        workers.append(Worker(role if name == APART else name, *_made(spec, name, setting, index), cores=share))
    return Arrangement(name, tuple(workers), _described(name, setting, workers))


def _made(spec: WorkerSpec, name: str, setting: Setting, index: int) -> tuple[WorkerSpec, Command]:
    """The spec for its hardware, and its command. What is not handed over needs no KV connector, and has none."""
    if setting.engine == "sim":
        # Two workers have twice the hardware of one: so one that is twice as fast stands for two.
        speed = 1.0 if name == APART else 2.0
        spec = replace(spec, extra_args=("--speed", f"{speed:g}", "--handshake-s", "0.5"))
        return spec, sim.command(spec)
    if name == COLOCATED:
        spec = replace(spec, extra_args=("--no-enable-chunked-prefill",))
    if setting.device == "gpu":
        if name == APART:
            spec = replace(spec, device_ids=(index,))
        else:
            spec = replace(spec, data_parallel_size=_GPUS, device_ids=tuple(range(_GPUS)))
    command = vllm.command(spec)
    return spec, command if name == APART else without_connector(command)


def without_connector(command: Command) -> Command:
    """The same engine with no KV connector, as it is served where nothing is handed over."""
    at = command.argv.index("--kv-transfer-config")
    return replace(command, argv=command.argv[:at] + command.argv[at + 2 :])


def _described(name: str, setting: Setting, workers: Sequence[Worker]) -> str:
    if setting.engine == "sim":
        return "2 simulated engines" if name == APART else "1 simulated engine, twice as fast"
    if setting.device == "gpu":
        return "a GPU for each worker" if name == APART else f"{_GPUS} GPUs, data parallel"
    return ", ".join(f"{worker.name} on core {'+'.join(map(str, worker.cores)) or '?'}" for worker in workers)


def sim_model() -> str:
    """The name that simulated engines serve."""
    return _SIM_MODEL
