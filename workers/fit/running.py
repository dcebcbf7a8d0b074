"""What would not start, or works badly once it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from workers import obsolete
from workers.fit.misfit import Misfit, Pair, Severity, text
from workers.fit.seen import reads_back
from workers.memory import memory_of
from workers.spec import ports
from workers.vllm import command, transfer_config

_MANY_SEQS = 64
"""From here on a decode batch keeps a GPU busy without guessing."""
_SHORT_LEASE_S = 60


def _starts(pair: Pair) -> Iterator[Misfit]:
    for side in pair.sides:
        spec = side.spec
        if len(spec.ranks) < spec.data_parallel_size:  # which ranks, and where the others are, is said when a node is started
            spec = replace(spec, data_parallel_rank=spec.data_parallel_rank or 0, data_parallel_address="10.0.0.1")
        try:
            obsolete.check_environment(dict(spec.env))
            obsolete.check_arguments(spec.extra_args)
            if spec.transfer_config is not None:
                obsolete.check_transfer_config(json.dumps(spec.transfer_config), spec.role, lease_s=spec.kv_lease_s)
            command(spec)
        except ValueError as error:
            yield Misfit(
                rule="command",
                severity=Severity.ERROR,
                prefill=str(error) if side is pair.prefill else "",
                decode=str(error) if side is pair.decode else "",
                why=f"{side.name} is not started like this",
                source="workers/vllm.py, workers/obsolete.py",
                fix="what the message says",
            )


def _served_name(pair: Pair) -> Iterator[Misfit]:
    if pair.prefill.spec.served_model_name != pair.decode.spec.served_model_name:
        yield pair.misfit(
            "served-name",
            Severity.ERROR,
            lambda s: s.served_model_name,
            "a request names one model, and goes to both: one of them answers 404",
            "docs/architecture.md",
            "the same served_model_name on both",
        )


def _speculation(pair: Pair) -> Iterator[Misfit]:
    if pair.decode.spec.speculative is None:
        return
    seqs = pair.decode.spec.max_num_seqs
    if seqs is None or seqs >= _MANY_SEQS:
        yield pair.misfit(
            "speculative-batch",
            Severity.WARN,
            lambda s: f"max_num_seqs {text(s.max_num_seqs)}",
            "a decode pool's batches are large, which keep the GPU busy: checking guesses then takes time from other "
            "streams, and tokens come slower, not faster",
            "vLLM documentation, speculative decoding (for low request rates)",
            f"no speculative decoding, or max_num_seqs below {_MANY_SEQS} on a pool of its own",
        )
    if pair.hybrid:
        yield pair.misfit(
            "speculative-hybrid",
            Severity.WARN,
            lambda s: (s.speculative or {}).get("method"),
            "with layers of several kinds the draft's KV is not always handed over; crashes have been reported",
            "vllm#54926, dynamo#12198",
            "no speculative decoding",
        )


def _load_failure(pair: Pair) -> Iterator[Misfit]:
    policy = transfer_config(pair.decode.spec).get("kv_load_failure_policy", "fail")
    hybrid = pair.hybrid
    if policy == "fail":
        yield pair.misfit(
            "load-failure",
            Severity.INFO,
            lambda s: transfer_config(s).get("kv_load_failure_policy", "fail"),
            "a decode worker that cannot pull answers 500 to the client: the filter makes one attempt",
            "vLLM 0.32 config/kv_transfer.py",
            "recompute, if an answer that comes late is better than none",
        )
    elif hybrid:
        yield pair.misfit(
            "load-failure-hybrid",
            Severity.WARN,
            lambda s: transfer_config(s).get("kv_load_failure_policy", "fail"),
            "with layers of several kinds a pull that failed has been seen to give wrong text, answered with 200",
            "vllm#52234",
            "kv_load_failure_policy: fail",
        )


def _lease(pair: Pair) -> Iterator[Misfit]:
    if pair.prefill.spec.kv_lease_s < _SHORT_LEASE_S:
        yield pair.misfit(
            "lease",
            Severity.WARN,
            lambda s: f"{s.kv_lease_s} s",
            "the first transfer of a pair takes tens of seconds, and a read after the lease is not noticed: wrong text",
            "vllm#52234; measured with vLLM 0.32: 31 s",
            f"kv_lease_s of {_SHORT_LEASE_S} or more",
        )


def _next_turn(pair: Pair) -> Iterator[Misfit]:
    prefill, decode = reads_back(pair.prefill.spec), reads_back(pair.decode.spec)
    if prefill != decode:
        yield pair.misfit(
            "next-turn-one-side",
            Severity.ERROR if decode else Severity.WARN,
            lambda s: f"bidirectional_kv_xfer {'on' if reads_back(s) else 'off'}",
            "a decode worker keeps the blocks of its answers, and a prefill worker that is given them never answers"
            if decode
            else "no decode worker keeps blocks that it could read",
            "vLLM 0.32 nixl/pull_scheduler.py: get_num_new_matched_tokens, update_state_after_alloc",
            "the same bidirectional_kv_xfer on both",
        )
    if decode and pair.hybrid:
        yield pair.misfit(
            "next-turn-hybrid",
            Severity.WARN,
            lambda s: f"bidirectional_kv_xfer {'on' if reads_back(s) else 'off'}",
            "with layers of several kinds the filter reads nothing back, and the blocks of every answer are kept for nothing",
            "extproc/handoff/nixl_turn.py",
            "no bidirectional_kv_xfer",
        )
    if decode and pair.decode.spec.transfer_config is None and pair.decode.spec.decoder_kv_blocks_ttl_s is None:
        yield pair.misfit(
            "next-turn-ttl",
            Severity.INFO,
            lambda s: s.decoder_kv_blocks_ttl_s,
            "each streamed answer to a handoff takes its room in the KV cache for 480 s more: nobody can give that back",
            "vLLM 0.32 nixl/base_scheduler.py: decoder_kv_blocks_ttl",
            "decoder_kv_blocks_ttl_s as long as people take for the next turn, say 60; the filter's handoff.next_turn.ttl_s is "
            "the same number",
        )


def _prefix_cache(pair: Pair) -> Iterator[Misfit]:
    if pair.decode.spec.prefix_caching is False:
        yield pair.misfit(
            "prefix-caching",
            Severity.WARN,
            lambda s: "off" if s.prefix_caching is False else "on",
            "the decode worker pulls every block of every turn again, and the router cannot count on what it holds",
            "vLLM 0.32 nixl/pull_scheduler.py",
            "prefix_caching: true",
        )
    if (pair.prefill.spec.prefix_hash_algo, pair.prefill.spec.hash_seed) != (
        pair.decode.spec.prefix_hash_algo,
        pair.decode.spec.hash_seed,
    ):
        yield pair.misfit(
            "block-hash",
            Severity.WARN,
            lambda s: f"{text(s.prefix_hash_algo)}, {text(s.hash_seed)}",
            "the same block has another hash on each, so that what one reports says nothing about the other",
            "vLLM 0.32 v1/core/kv_cache_utils.py",
            "the same prefix_hash_algo and hash_seed on both",
        )
    for side in pair.sides:
        if (side.spec.prefix_hash_algo or "").startswith("xxhash") and side.spec.hash_seed is None:
            yield pair.misfit(
                "block-hash-seed",
                Severity.WARN,
                lambda s: f"{text(s.prefix_hash_algo)}, {text(s.hash_seed)}",
                "xxhash begins with a random number in every process, unless a seed is given",
                "vLLM 0.32 v1/core/kv_cache_utils.py",
                "hash_seed: 0, or sha256_cbor",
            )
            return


def _graphs(pair: Pair) -> Iterator[Misfit]:
    if pair.decode.spec.device == "gpu" and (
        pair.decode.spec.enforce_eager or "--enforce-eager" in pair.decode.spec.extra_args
    ):
        yield pair.misfit(
            "eager",
            Severity.WARN,
            lambda s: "eager" if s.enforce_eager else "graphs",
            "without CUDA graphs every decode step waits for the CPU to start its kernels, one by one",
            "vLLM documentation, CUDA graphs",
            "no enforce_eager on decode workers",
        )


def _lengths(pair: Pair) -> Iterator[Misfit]:
    if pair.prefill.spec.max_model_len_tokens != pair.decode.spec.max_model_len_tokens:
        yield pair.misfit(
            "max-model-len",
            Severity.WARN,
            lambda s: s.max_model_len_tokens,
            "a prompt that one of them takes, the other refuses with 400",
            "vLLM 0.32 renderers",
            "the same max_model_len_tokens on both",
        )


def _weights(pair: Pair) -> Iterator[Misfit]:
    if pair.prefill.spec.quantization != pair.decode.spec.quantization:
        yield pair.misfit(
            "quantization",
            Severity.WARN,
            lambda s: s.quantization,
            "the handshake does not see it, but the KV then comes from other weights than those that go on with it",
            "vLLM 0.32 nixl/metadata.py",
            "the same quantization on both",
        )


def _limits(pair: Pair) -> Iterator[Misfit]:
    for side in pair.sides:
        spec = side.spec
        if spec.max_num_seqs is not None and spec.max_num_queued_reqs is not None:
            running = spec.max_num_seqs * len(spec.ranks)
            if spec.max_num_queued_reqs < running:
                yield pair.misfit(
                    "queue-limit",
                    Severity.WARN,
                    lambda s: f"{text(s.max_num_queued_reqs)} for {len(s.ranks)} x {text(s.max_num_seqs)}",
                    f"the limit counts what runs too, over all ranks: {side.name} is never full before it answers 503",
                    "vLLM 0.32 config/scheduler.py",
                    f"max_num_queued_reqs of {running} or more",
                )
        if (
            spec.max_num_seqs is not None
            and spec.max_num_batched_tokens is not None
            and spec.max_num_batched_tokens < spec.max_num_seqs
        ):
            yield pair.misfit(
                "step-size",
                Severity.ERROR,
                lambda s: f"{text(s.max_num_batched_tokens)} for {text(s.max_num_seqs)} sequences",
                f"{side.name} does not start: a step must have room for a token of each sequence",
                "vLLM 0.32 config/scheduler.py",
                "a larger max_num_batched_tokens",
            )


def _one_machine(pair: Pair) -> Iterator[Misfit]:
    p, d = pair.prefill.spec, pair.decode.spec
    if not (p.device_ids and d.device_ids):
        return  # without GPUs by number they may be on two machines
    if set(p.device_ids) & set(d.device_ids):
        yield pair.misfit(
            "same-gpu",
            Severity.WARN,
            lambda s: s.device_ids,
            "on one machine the second to start finds the GPU's memory taken",
            "vLLM 0.32 v1/worker/gpu_worker.py",
            "device_ids that do not overlap, unless they are on two machines",
        )
    if shared := ports(p).keys() & ports(d).keys():
        yield pair.misfit(
            "same-port",
            Severity.WARN,
            lambda s: ", ".join(str(port) for port in sorted(ports(s)) if port in shared),
            "on one machine the second to start cannot listen",
            "workers/spec.py: ports",
            "other port, side_channel_port, kv_events_port or kv_events_replay_port, unless they are on two machines",
        )


def _memory(pair: Pair) -> Iterator[Misfit]:
    for side in pair.sides:
        found = memory_of(side.profile, side.spec)
        if found is None:
            continue
        each_rank = found.kv_tokens // len(side.spec.ranks)
        longest = side.spec.max_model_len_tokens or 0
        hardware = side.profile.hardware
        assert hardware is not None
        shown = found.line(side.name, hardware.memory_gb)
        if found.kv_gb <= 0 or each_rank < longest:
            yield Misfit(
                rule="memory",
                severity=Severity.ERROR,
                prefill=shown if side is pair.prefill else "",
                decode=shown if side is pair.decode else "",
                why="weights and the KV cache of one longest prompt do not fit: it does not start",
                source="arithmetic on the profile's numbers",
                fix="more GPUs, weights in fp8, or a smaller max_model_len_tokens",
            )


def _host_cache(pair: Pair) -> Iterator[Misfit]:
    found = memory_of(pair.prefill.profile, pair.prefill.spec)
    if found is not None and found.kv_gb > 0 and 0 < found.host_tokens < found.kv_tokens:
        yield Misfit(
            rule="host-cache",
            severity=Severity.WARN,
            prefill=f"{found.host_tokens:,} tokens behind {found.kv_tokens:,} on the GPUs",
            decode="",
            why="every prompt is copied to host memory while it is on the GPU: less room there than on the GPU holds hardly "
            "anything that the GPU has dropped",
            source="vLLM 0.32 kv_connector/v1/offloading/scheduler.py: _build_store_jobs",
            fix="a host_cache_gib of several times the GPU cache, or none",
        )


RULES: tuple[Callable[[Pair], Iterator[Misfit]], ...] = (
    _starts,
    _served_name,
    _speculation,
    _load_failure,
    _lease,
    _next_turn,
    _prefix_cache,
    _graphs,
    _lengths,
    _weights,
    _limits,
    _one_machine,
    _memory,
    _host_cache,
)
