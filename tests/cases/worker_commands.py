"""The commands that every profile renders to, one file a role: ``python -m tests.cases.worker_commands`` writes them anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from workers.launch import Plan, plan
from workers.profile import builtin_names, load_profile, role_of
from workers.shell import as_shell

FOLDER = Path(__file__).parent / "workers"
ADDRESS = "10.0.0.7"


def all_roles() -> Iterator[tuple[str, str]]:
    """Every profile with each of its roles and decode variants."""
    for name in builtin_names():
        for role in ("prefill", "decode", *load_profile(name).decode_variants):
            yield name, role


def planned(name: str, role_name: str, **changes: object) -> Plan:
    """A worker as `baton worker` would start it on the machine 10.0.0.7."""
    profile = load_profile(name)
    role, variant = role_of(role_name)
    given: dict[str, object] = {"model": None if profile.model else "example/model", "side_channel_host": ADDRESS}
    if profile.device == "cpu":
        # The demo model's own folder is another one on every machine.
        given |= {"model": "/models/SmolLM2-135M-Instruct", "threads": 2}
    elif (profile.decode.data_parallel_local or 0) < (profile.decode.data_parallel_size or 0) and role_name == "decode":
        given |= {"data_parallel_rank": 8, "data_parallel_address": "10.0.0.6"}
    return plan(profile, role, variant=variant, changes=given | changes, environ={}, prepare=False)


def rendered(name: str, role: str) -> str:
    """The command as `--dry-run` prints it, with `python` for the path of this Python."""
    command = planned(name, role).command
    argv = ["python" if part == sys.executable else part for part in command.argv]
    return as_shell(argv, command.env) + "\n"


def file_of(name: str, role: str) -> Path:
    """Where the command is kept."""
    return FOLDER / f"{name}.{role}.txt"


def main() -> None:
    """Write all of them, and remove those of profiles that are no longer there."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {file_of(*each): rendered(*each) for each in all_roles()}
    for file in FOLDER.glob("*.txt"):
        if file not in wanted:
            file.unlink()
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
