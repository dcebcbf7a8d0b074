"""Ids are random, of one length, and never given twice, not even by a process and the one that it forked."""

from __future__ import annotations

import os
import re

from extproc.attempts import leg_id
from extproc.ids import Ids


def test_ids_are_32_digits_and_never_the_same() -> None:
    ids = Ids()
    made = [ids.fresh() for _ in range(2_000)]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_a_forked_process_makes_others() -> None:
    ids = Ids()
    ids.fresh()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, ids.fresh().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 32).decode() != ids.fresh()
    os.close(read)
    os.close(write)


def test_the_id_of_a_prefill_call_begins_with_the_requests_own_made_plain() -> None:
    for request_id, plain in (
        ("6f1c8a2e-6e0a-4b0e-9d8e-0a1b2c3d4e5f", "6f1c8a2e-6e0a-4b0e-9d8e-0a1b2c3d4e5f"),
        ("join-me.1", "join-me.1"),
        ("a:b c\n", "a_b_c_"),
        ("ünï²", "_n__"),
        ("x" * 100, "x" * 64),
        ("", ""),
    ):
        assert re.fullmatch(re.escape(plain) + "-[0-9a-f]{32}", leg_id(request_id))
