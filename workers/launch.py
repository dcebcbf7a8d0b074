"""From a profile, a role and flags to what is run: the worker, its command, what its environment must not have, and notes.

Nothing is started here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from workers import host_cache, obsolete, vllm
from workers.address import routable
from workers.memory import memory_of
from workers.model import SMOLLM2, ModelError, resolve, smollm2_folder
from workers.own_address import own_address
from workers.profile import Profile, worker_spec
from workers.shell import is_secret
from workers.sim import command as sim
from workers.spec import Command, Role, WorkerSpec

Engine = Literal["vllm", "sim"]

_COMMANDS: dict[Engine, Callable[[WorkerSpec], Command]] = {"vllm": vllm.command, "sim": sim.command}
_TEARDOWN_S = 30.0
"""After its drain time an engine still gives back GPU memory and shared memory; it is killed only after that."""
_ANY = ("0.0.0.0", "::")  # noqa: S104  (recognised, not bound)

_OURS = {
    "--model": "--model before the --",
    "--served-model-name": "--served-model-name before the --",
    "--host": "--host before the --",
    "--port": "--port before the --",
    "--tensor-parallel-size": "--tensor-parallel-size before the --",
    "-tp": "--tensor-parallel-size before the --",
    "--data-parallel-size": "--data-parallel-size before the --",
    "-dp": "--data-parallel-size before the --",
    "--data-parallel-rank": "--data-parallel-rank before the --",
    "--data-parallel-size-local": "--data-parallel-local before the --",
    "--data-parallel-start-rank": "--data-parallel-rank before the --",
    "--kv-offloading-size": "--host-cache-gib before the --, which leaves NIXL where it is: vLLM's own flag takes its place",
    "--kv-offloading-backend": "--host-cache-gib or --cache-server before the --",
    "--kv-events-config": "kv_events_port in the profile, or --kv-events-port before the --",
    "--shutdown-timeout": "--drain before the --",
    "--ssl-certfile": "--ssl-certfile before the --",
    "--ssl-keyfile": "--ssl-keyfile before the --",
    "--ssl-ca-certs": "--ssl-ca-certs before the --",
    "--ssl-cert-reqs": "--ssl-ca-certs before the --, which means that clients must have a certificate",
}
"""Arguments of vLLM that would make ports, the drain time, readiness or the handshake differ from what is worked out here."""

_SECRET_FLAGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}


class LaunchError(ValueError):
    """The worker cannot be started as asked; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run."""

    spec: WorkerSpec
    command: Command
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set that must not be shown."""
    unset: tuple[str, ...] = ()
    """Inherited variables that the engine must not see."""
    notes: tuple[str, ...] = ()
    grace_s: float = _TEARDOWN_S
    """How long the engine may take to end after SIGTERM, before it is killed."""


def plan(
    profile: Profile,
    role: Role,
    *,
    variant: str | None = None,
    changes: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str],
    engine: Engine = "vllm",
    secrets: Mapping[str, str] | None = None,
    prepare: bool = True,
) -> Plan:
    """What ``baton worker`` runs. ``changes`` are fields of WorkerSpec, ``arguments`` go to vLLM.

    Raises LaunchError, and ProfileError, ObsoleteError, AddressError, ModelError, which are ValueError or RuntimeError too.
    ``prepare``: see that the model is there, and convert the demo model if it is the one that is asked for.
    """
    notes: list[str] = []
    spec = worker_spec(profile, role, variant, changes)
    found = obsolete.check_environment({**environ, **dict(spec.env)}, cache_server=spec.cache_server is not None)
    notes += found.notes
    told = {"kv_lease_s": found.lease_s, "attention_backend": found.attention_backend}
    told = {name: value for name, value in told.items() if value is not None}
    spec = worker_spec(profile, role, variant, changes, defaults=told)
    spec = replace(spec, env=tuple((name, value) for name, value in spec.env if name not in found.unset))
    if engine == "sim":
        spec, hidden = _for_sim(spec, profile, arguments, notes)
    else:
        spec, hidden = _for_vllm(spec, arguments, notes, prepare=prepare)
    spec = _address(spec, environ, notes, chosen=bool(changes and changes.get("host")))
    try:
        command = _COMMANDS[engine](spec)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    notes += _replaced(command, environ, given=dict(spec.env))
    elsewhere = spec.cache_server is not None or spec.host_cache_gib is not None
    if role == "prefill" and profile.cache is not None and not elsewhere and engine == "vllm":
        notes.append("the profile describes an LMCache server for prefill workers, and none is named: --cache-server")
    return Plan(
        spec=spec,
        command=command,
        secrets={**hidden, **(secrets or {})},
        unset=tuple(name for name in found.unset if name in environ),
        notes=tuple(notes),
        grace_s=spec.shutdown_timeout_s + _TEARDOWN_S,
    )


def _replaced(command: Command, environ: Mapping[str, str], *, given: Mapping[str, str]) -> list[str]:
    """Notes on inherited variables that the engine gets another value of; secrets are not shown."""
    return [
        f"{name} is {value} for the engine, not {environ[name]} as in the environment"
        for name, value in command.env.items()
        if environ.get(name, value) != value and not (name in given or is_secret(name))
    ]


def _for_vllm(
    spec: WorkerSpec, arguments: Sequence[str], notes: list[str], *, prepare: bool
) -> tuple[WorkerSpec, Mapping[str, str]]:
    """The spec with what vLLM can take of ``arguments``, and the secrets among them."""
    rest, hidden = _take_secrets((*spec.extra_args, *arguments), notes)
    rest, dropped = obsolete.check_arguments(rest)
    notes += dropped
    spec = _take_transfer_config(replace(spec, extra_args=rest), notes)
    _refuse_ours(spec.extra_args)
    return _model(spec, prepare=prepare), hidden


def _for_sim(
    spec: WorkerSpec, profile: Profile, arguments: Sequence[str], notes: list[str]
) -> tuple[WorkerSpec, Mapping[str, str]]:
    """The spec with one rank, and with options of the simulated engine in place of vLLM's."""
    if spec.data_parallel_size > 1:
        notes.append("the simulated engine has one rank: data parallelism is left out")
    alone = replace(
        spec,
        data_parallel_size=1,
        data_parallel_local=None,
        data_parallel_rank=None,
        data_parallel_address=None,
        host_cache_gib=None,
        env=(),
        extra_args=(*_host_cache_of_sim(spec, profile), *arguments),
    )
    return alone, {}


def _host_cache_of_sim(spec: WorkerSpec, profile: Profile) -> tuple[str, ...]:
    """The simulated engine counts in tokens."""
    if spec.host_cache_gib is None:
        return ()
    try:
        host_cache.engine_bytes(spec)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    found = memory_of(profile, spec)
    if found is None:
        raise LaunchError(
            "--host-cache-gib: the simulated engine counts in tokens, and the profile does not say what one weighs (facts and "
            "hardware): --host-cache-tokens after the --"
        )
    return "--host-cache-tokens", str(found.host_tokens)


def _take_secrets(arguments: Sequence[str], notes: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments without API key and token, which every user of the machine could read in the process list."""
    rest: list[str] = []
    found: dict[str, str] = {}
    index = 0
    while index < len(arguments):
        flag, equals, value = arguments[index].partition("=")
        index += 1
        if flag not in _SECRET_FLAGS:
            rest.append(arguments[index - 1])
            continue
        if not equals:
            if index >= len(arguments):
                raise LaunchError(f"{flag}: a value is missing")
            value = arguments[index]
            index += 1
            if index < len(arguments) and not arguments[index].startswith("-"):
                raise LaunchError(f"{flag}: one value; vLLM takes several on the command line only, where all users see them")
        found[_SECRET_FLAGS[flag]] = value
        notes.append(f"{flag} is handed over as {_SECRET_FLAGS[flag]}, which the process list does not show")
    return tuple(rest), found


def _take_transfer_config(spec: WorkerSpec, notes: list[str]) -> WorkerSpec:
    rest: list[str] = []
    text: str | None = None
    index = 0
    while index < len(spec.extra_args):
        flag, equals, value = spec.extra_args[index].partition("=")
        index += 1
        if flag.replace("_", "-") != "--kv-transfer-config":
            rest.append(spec.extra_args[index - 1])
            continue
        if not equals:
            if index >= len(spec.extra_args):
                raise LaunchError(f"{flag}: a value is missing")
            value = spec.extra_args[index]
            index += 1
        text = value
    if text is None and spec.transfer_config is not None:
        text = json.dumps(spec.transfer_config)  # the profile's
    if text is None:
        return spec
    for flag, given in (("--cache-server", spec.cache_server), ("--host-cache-gib", spec.host_cache_gib)):
        if given is not None:
            raise LaunchError(f"{flag} and --kv-transfer-config: the first is a part of the second; give one of them")
    config, said = obsolete.check_transfer_config(text, spec.role, lease_s=spec.kv_lease_s)
    notes += said
    if spec.kv_load_failure_policy is not None and "kv_load_failure_policy" not in config:
        config["kv_load_failure_policy"] = spec.kv_load_failure_policy
        notes.append(f"--kv-transfer-config: kv_load_failure_policy {spec.kv_load_failure_policy} is added, from the profile")
    return replace(spec, transfer_config=config, extra_args=tuple(rest))


def _refuse_ours(arguments: Sequence[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
        if flag in _OURS:
            raise LaunchError(f"{flag} after the --: say it by {_OURS[flag]}, so that ports and handshake stay in step with it")


def _address(spec: WorkerSpec, environ: Mapping[str, str], notes: list[str], *, chosen: bool) -> WorkerSpec:
    """The spec with an address that peers reach; and where the listener's was not chosen, that one for it too."""
    given = spec.side_channel_host
    if given is None and chosen and spec.host not in _ANY:
        given = spec.host
    if given is not None and "/" in given:
        # A worker on several networks is told which of them its peers are on.
        given = own_address(given)
    address, source = routable(given, environ)
    if source != "as given":
        notes.append(f"peers reach this worker by {address} ({source})")
    if address.startswith("127."):
        notes.append(f"{address}: only workers of this machine can reach this one")
    return replace(spec, side_channel_host=address, host=spec.host if chosen else address)


def _model(spec: WorkerSpec, *, prepare: bool) -> WorkerSpec:
    """The spec with a model that vLLM can open. A folder stays as it was named: the string is a part of the handshake."""
    if spec.model == SMOLLM2:
        folder = smollm2_folder()
        if prepare:
            resolve(SMOLLM2)
        return replace(spec, model=str(folder), local_model=True)
    folder = Path(spec.model).expanduser()
    looks_local = spec.model.startswith(("/", ".", "~"))
    if not prepare:
        return replace(spec, local_model=spec.local_model or looks_local)
    local = isinstance(resolve(spec.model), Path)
    if local and not folder.is_absolute():
        raise ModelError(f"{spec.model}: name the folder by its whole path, the same one on every worker: it is compared")
    return replace(spec, model=str(folder) if local else spec.model, local_model=spec.local_model or local)
