"""What would break the handshake: no handoff would succeed. The rules are those of vLLM 0.32's NixlConnector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from workers.fit.misfit import Misfit, Pair, Severity, text
from workers.fit.seen import NO_HMA, connectors, hashed_draft, hma, mode, option
from workers.spec import WorkerSpec
from workers.vllm import transfer_config

_HASH = "vLLM 0.32 nixl/metadata.py: compute_nixl_compatibility_hash"
_VALIDATE = "vLLM 0.32 nixl/base_worker.py: _validate_remote_agent_handshake"
_FLAT_LAYOUTS = frozenset(("NHD", "LBNHC", "BLNHC"))
"""Heads of a token lie side by side, so that a rank cannot read its share of a block in one piece."""


def _differs(rule: str, prefill: object, decode: object, why: str, fix: str) -> Iterator[Misfit]:
    if prefill != decode:
        yield Misfit(
            rule=rule,
            severity=Severity.ERROR,
            prefill=text(prefill),
            decode=text(decode),
            why=f"{why} is compared in the handshake, letter by letter: every handoff fails",
            source=_HASH,
            fix=fix,
        )


def _compared(pair: Pair) -> Iterator[Misfit]:
    p, d = pair.prefill.spec, pair.decode.spec
    yield from _differs("model", p.model, d.model, "the model's name or path", "the same string on both, path included")
    versions = pair.prefill.profile.vllm_version, pair.decode.profile.vllm_version
    yield from _differs("vllm-version", *versions, "vLLM's version", "the same image on both")
    yield from _differs(
        "kv-dtype",
        p.kv_cache_dtype or "auto",
        d.kv_cache_dtype or "auto",
        "the KV cache's dtype",
        "the same kv_cache_dtype on both; fp8 and fp8_e4m3 count as different",
    )
    yield from _differs("dtype", p.dtype or "auto", d.dtype or "auto", "the model's dtype", "the same dtype on both")
    yield from _differs(
        "attention-backend",
        p.attention_backend,
        d.attention_backend,
        "the attention backend",
        "the same attention_backend on both, or none on equal GPUs",
    )
    yield from _differs(
        "device", p.device, d.device, "the attention backend, which a CPU and a GPU do not share,", "the same device on both"
    )
    yield from _differs(
        "transfer-mode", mode(p), mode(d), "the transfer mode (push or pull)", "the same NIXL connector on both"
    )
    yield from _differs(
        "speculative",
        hashed_draft(p),
        hashed_draft(d),
        "an EAGLE or MTP draft, which has KV of its own,",
        "the same speculative configuration on both, or on neither",
    )
    if hma(p) != hma(d):
        both = sorted(NO_HMA.intersection(connectors(p) + connectors(d)))
        because = f"; {both[0]} turns it off" if both else ""
        yield from _differs(
            "hma",
            "on" if hma(p) else "off",
            "on" if hma(d) else "off",
            f"whether the hybrid KV cache manager is on{because}; it",
            "LMCacheMPConnector (--cache-server), which leaves it on; or hybrid_kv_cache_manager: false on both",
        )


def _connector(pair: Pair) -> Iterator[Misfit]:
    for side, wanted in ((pair.prefill, ("kv_producer", "kv_both")), (pair.decode, ("kv_consumer", "kv_both"))):
        role = transfer_config(side.spec).get("kv_role")
        if role not in wanted:
            yield pair.misfit(
                "kv-role",
                Severity.ERROR,
                lambda s: transfer_config(s).get("kv_role"),
                "a prefill worker must be kv_producer and a decode worker kv_consumer",
                "vLLM 0.32 config/kv_transfer.py",
                "leave transfer_config away: the role says it",
            )
            break
    if mode(pair.prefill.spec) == "none" and mode(pair.decode.spec) == "none":
        yield pair.misfit(
            "connector",
            Severity.ERROR,
            lambda s: ", ".join(connectors(s)),
            "neither has a NIXL connector: there is no handshake that these rules know",
            "docs/workers.md",
            "leave transfer_config away: NIXL is what it then is",
        )


def _block_size(pair: Pair) -> Iterator[Misfit]:
    p, d = pair.prefill.spec.block_size_tokens, pair.decode.spec.block_size_tokens
    if p == d:
        return
    facts = pair.facts
    if d % p:
        why = "a block of the decode worker must be a whole number of the prefill worker's: the handshake fails"
    elif facts is not None and facts.hybrid:
        why = "models with several kinds of layers need the same block size on both"
    else:
        yield pair.misfit(
            "block-size",
            Severity.INFO,
            lambda s: s.block_size_tokens,
            "allowed, as the decode worker's is a multiple; each block is then put together after the transfer",
            _VALIDATE,
            "the same block_size_tokens on both, unless there is a reason",
        )
        return
    yield pair.misfit(
        "block-size", Severity.ERROR, lambda s: s.block_size_tokens, why, _VALIDATE, "the same block_size_tokens on both"
    )


def _tensor_parallel(pair: Pair) -> Iterator[Misfit]:
    p, d = pair.prefill.spec.tensor_parallel_size, pair.decode.spec.tensor_parallel_size
    if p == d:
        return
    facts = pair.facts
    if max(p, d) % min(p, d):
        yield pair.misfit(
            "tp-divides",
            Severity.ERROR,
            lambda s: s.tensor_parallel_size,
            "one must be a multiple of the other: the handshake fails",
            "vLLM 0.32 kv_connector/utils.py: tp_ratio",
            "sizes such as 4 and 2, or 4 and 8",
        )
        return
    if facts is None or facts.mla:
        return
    if p > d and p > facts.kv_heads:
        yield pair.misfit(
            "tp-replicated",
            Severity.ERROR,
            lambda s: s.tensor_parallel_size,
            f"the prefill worker has more GPUs than the model has KV heads ({facts.kv_heads}), so that heads are there "
            "twice; a smaller decode worker cannot read that",
            _VALIDATE,
            f"prefill on at most {facts.kv_heads} GPUs, or decode on as many as prefill",
        )
    if any(side.spec.kv_cache_layout in _FLAT_LAYOUTS for side in pair.sides):
        yield pair.misfit(
            "layout-tp",
            Severity.ERROR,
            lambda s: s.kv_cache_layout,
            "with different tensor parallelism each rank reads some heads of a block, which must lie together",
            _VALIDATE,
            "leave kv_cache_layout away (NixlConnector takes LBHNC), or say HND on both",
        )


def _layout(pair: Pair) -> Iterator[Misfit]:
    facts = pair.facts
    p, d = pair.prefill.spec.kv_cache_layout or "HND", pair.decode.spec.kv_cache_layout or "HND"
    same = {"NHD": "LBNHC", "HND": "LBHNC"}
    if same.get(p, p) == same.get(d, d) or (facts is not None and facts.mla):
        return
    yield pair.misfit(
        "layout",
        Severity.ERROR,
        lambda s: s.kv_cache_layout,
        "the order of heads and tokens within a block must be the same",
        _VALIDATE,
        "leave kv_cache_layout away on both: NixlConnector takes LBHNC (HND)",
    )


def _pipeline(pair: Pair) -> Iterator[Misfit]:
    def size(spec: WorkerSpec) -> int:
        return option(spec, "--pipeline-parallel-size", "-pp")

    if size(pair.decode.spec) > 1 or (
        size(pair.prefill.spec) > 1 and mode(pair.prefill.spec) == "pull" and hma(pair.prefill.spec)
    ):
        yield pair.misfit(
            "pipeline",
            Severity.ERROR,
            size,
            "decode workers cannot be pipelines; prefill workers only without the hybrid KV cache manager, or pushing",
            "vLLM 0.32 nixl/base_worker.py",
            "tensor or data parallelism in its place",
        )


def _context_parallel(pair: Pair) -> Iterator[Misfit]:
    def size(spec: WorkerSpec) -> int:
        return option(spec, "--decode-context-parallel-size", "-dcp")

    facts = pair.facts
    for side in pair.sides:
        dcp = size(side.spec)
        if dcp > 1 and (dcp != side.spec.tensor_parallel_size or (facts is not None and not facts.mla)):
            yield pair.misfit(
                "dcp",
                Severity.ERROR,
                size,
                "decode context parallelism with NIXL is for MLA models, and then over all tensor-parallel GPUs or none",
                "vLLM 0.32 config/vllm.py",
                "decode-context-parallel-size 1, or that of tensor parallelism",
            )
            return


RULES: tuple[Callable[[Pair], Iterator[Misfit]], ...] = (
    _compared,
    _connector,
    _block_size,
    _tensor_parallel,
    _layout,
    _pipeline,
    _context_parallel,
)
