"""What ``baton worker profiles`` and ``baton worker check`` print: tables and JSON from profiles and from what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from workers import fit
from workers.memory import Memory, kv_bytes_per_token, memory_of
from workers.profile import Profile, ProfileError, load_profile, role_of, worker_spec
from workers.spec import Role

_COLOURS = {fit.Severity.ERROR: "red", fit.Severity.WARN: "yellow", fit.Severity.INFO: "cyan"}

_PROMPT_TOKENS = 8192


@dataclass(frozen=True)
class Checked:
    """A prefill and a decode worker that were compared."""

    prefill: str
    decode: str
    found: list[fit.Misfit]


def check(names: Sequence[str], model: str | None = None) -> list[Checked]:
    """Compare: one profile, its prefill worker with each of its decode workers; two, each ``profile`` or ``profile:role``.

    ``model`` stands in for profiles that name none. Raises ProfileError.
    """
    if len(names) == 1:
        profile, _, named = names[0].partition(":")
        if named:
            raise ProfileError(f"{names[0]}: compare it with what? Give a second profile, or leave :{named} away")
        loaded = load_profile(profile)
        pairs = [(f"{profile}:prefill", f"{profile}:{decode}") for decode in ("decode", *loaded.decode_variants)]
    else:
        pairs = [(_named(names[0], "prefill"), _named(names[1], "decode"))]
    checked = []
    for prefill, decode in pairs:
        sides = _side(prefill, "prefill", model), _side(decode, "decode", model)
        checked.append(Checked(prefill, decode, fit.misfits(*sides)))
    return checked


def check_table(checked: Checked) -> Table:
    """The findings of one pair, worst first."""
    table = Table(box=None, pad_edge=False)
    for heading in ("severity", "rule", "prefill", "decode", "why", "source", "fix"):
        table.add_column(heading, overflow="fold")
    for each in checked.found:
        colour = _COLOURS[each.severity]
        row = (each.rule, each.prefill, each.decode, each.why, each.source, each.fix)
        table.add_row(f"[{colour}]{each.severity.value}[/]", *(text.replace("[", r"\[") for text in row))
    return table


def check_json(checked: Sequence[Checked]) -> str:
    """All pairs, as JSON."""
    pairs = [{"prefill": each.prefill, "decode": each.decode, "findings": each.found} for each in checked]
    return msgspec.json.format(msgspec.json.encode({"version": 1, "pairs": pairs})).decode()


def profiles_table(names: Sequence[str]) -> Table:
    """One line a profile. Raises ProfileError."""
    headings = ("profile", "model", "hardware", "GPUs prefill", "GPUs decode", "source", "run here")
    table = Table(*headings, box=None, pad_edge=False)
    for name in names:
        profile = load_profile(name)
        gpus = {role: str(_gpus(profile, role)) for role in ("prefill", "decode", *profile.decode_variants)}
        decode = [gpus["decode"], *(f"{gpus[variant]} ({variant})" for variant in profile.decode_variants)]
        table.add_row(
            name,
            profile.model or "any",
            profile.hardware.gpu if profile.hardware else "CPU" if profile.device == "cpu" else "any",
            gpus["prefill"],
            ", ".join(decode),
            "\n".join(profile.sources),
            "no" if profile.not_run_here else "yes",
        )
    return table


def profiles_json(names: Sequence[str]) -> str:
    """The same, with memory, as JSON. Raises ProfileError."""
    entries = []
    for name in names:
        profile = load_profile(name)
        roles = {role: {"gpus": _gpus(profile, role), "memory": _memory(profile, role)} for role in _roles(profile)}
        fields = ("title", "model", "device", "vllm_version", "sources", "not_run_here")
        entries.append({"name": name, **{field: getattr(profile, field) for field in fields}, "roles": roles})
    return msgspec.json.format(msgspec.json.encode(entries)).decode()


def profile_text(name: str) -> str:
    """One profile in full: where its numbers are from, what was not run, and whether it fits. Raises ProfileError."""
    profile = load_profile(name)
    lines = [profile.title, f"model {profile.model or '(any: --model)'}, vLLM {profile.vllm_version}", "", "sources:"]
    lines += [f"  {source}" for source in profile.sources]
    lines += ["not run here:", *(f"  {each}" for each in profile.not_run_here)] if profile.not_run_here else ["run here"]
    if profile.link is not None:
        speed = "" if profile.link.gb_per_s is None else f", {profile.link.gb_per_s:g} GB/s"
        lines.append(f"link: {profile.link.kind}{speed}")
    lines += [*memory_lines(profile), *_handoff_lines(profile)]
    return "\n".join(lines)


def memory_lines(profile: Profile) -> list[str]:
    """One line for each role and variant: how its memory is used. Empty where the profile does not say enough."""
    found = []
    for role in _roles(profile):
        memory = _memory(profile, role)
        if memory is not None and profile.hardware is not None:
            found.append(memory.line(role, profile.hardware.memory_gb))
    return found


def _handoff_lines(profile: Profile) -> list[str]:
    """What a prompt's KV cache weighs, and how long the profile's link carries it; empty where it does not say enough."""
    if profile.facts is None:
        return []
    dtype = worker_spec(profile, "prefill", None, {"model": profile.model or "any"}).kv_cache_dtype or "auto"
    each = kv_bytes_per_token(profile.facts, dtype)
    size_bytes = each * _PROMPT_TOKENS
    line = f"KV cache of a token: {each:,} bytes; of {_PROMPT_TOKENS:,} tokens: {size_bytes / 1e9:.2f} GB"
    if profile.link is not None and profile.link.gb_per_s is not None:
        line += f", {size_bytes / profile.link.gb_per_s / 1e6:.0f} ms over the link of one GPU"
    return [line]


def _roles(profile: Profile) -> list[str]:
    return ["prefill", "decode", *profile.decode_variants]


def _memory(profile: Profile, role: str) -> Memory | None:
    return memory_of(profile, worker_spec(profile, *role_of(role), {"model": profile.model or "any"}))


def _gpus(profile: Profile, role: str) -> int:
    """Of the whole group, on all its nodes."""
    spec = worker_spec(profile, *role_of(role), {"model": profile.model or "any"})
    return 0 if spec.device == "cpu" else spec.tensor_parallel_size * spec.data_parallel_size


def _named(name: str, role: Role) -> str:
    return name if ":" in name else f"{name}:{role}"


def _side(name: str, wanted: Role, model: str | None) -> fit.Side:
    profile_name, _, role_name = name.rpartition(":")
    role, variant = role_of(role_name)
    if role != wanted:
        raise ProfileError(f"{name}: a {wanted} worker is wanted in this place: PREFILL DECODE")
    profile = load_profile(profile_name)
    changes: dict[str, Any] = {} if profile.model else {"model": model or "any"}
    return fit.Side(name=name, profile=profile, spec=worker_spec(profile, role, variant, changes))
