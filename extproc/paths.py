"""Which HTTP path is treated how. One table; nothing else decides by path.

The paths are those of vLLM 0.32 (a test holds the table against a running engine). A path that is not here passes to one
worker, like an unknown endpoint of a newer engine would need.
"""

from __future__ import annotations

from enum import Enum
from urllib.parse import unquote


class Treatment(Enum):
    """What happens to a request. The first four are prefilled and decoded apart; :mod:`extproc.inference` says how."""

    __hash__ = object.__hash__  # that of Enum is written in Python, and this is a key for every request

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    """Anthropic's API; its errors have that API's shape."""
    WHOLE = "whole"
    """One worker does all of it."""
    MODELS = "models"
    """Answered for the whole pool."""
    REFUSED = "refused"
    """404: it controls the engine."""

    @property
    def apart(self) -> bool:
        """Prefill and decode on two workers."""
        return self in _APART


_APART = frozenset((Treatment.CHAT, Treatment.COMPLETIONS, Treatment.RESPONSES, Treatment.MESSAGES))

_POSTS = {
    "/v1/chat/completions": Treatment.CHAT,
    "/v1/completions": Treatment.COMPLETIONS,
    "/v1/responses": Treatment.RESPONSES,
    "/v1/messages": Treatment.MESSAGES,
}

_WHOLE = (
    "/v1/messages/count_tokens /v1/chat/completions/batch "
    "/v1/chat/completions/render /v1/completions/render /v1/messages/render /v1/responses/render "
    "/v1/chat/completions/derender /v1/completions/derender /inference/v1/generate "
    "/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank "
    "/v1/audio/transcriptions /v1/audio/translations /v1/realtime /v1/systemone /generative_scoring /cohere/v2/chat "
    "/tokenize /detokenize /tokenizer_info /health /ping /version /load /invocations /docs /redoc /openapi.json "
    "/docs/oauth2-redirect"
).split()

# Whoever reaches one of these can stop the engine, empty its caches, change its weights or read what others ask.
_REFUSED = (
    "/scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance /sleep /wake_up /is_sleeping /release_kv_cache_memory "
    "/pause /resume /is_paused /abort_requests /inference/v1/abort_requests /reset_prefix_cache /reset_mm_cache "
    "/reset_encoder_cache /collective_rpc /server_info /start_profile /stop_profile /v1/load_lora_adapter "
    "/v1/unload_lora_adapter /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update "
    "/start_draft_weight_update /update_weights /finish_weight_update /update_weight_version /weight_info "
    "/weight_checker /get_world_size /metrics /kv_event_sources /adapters"
).split()

TABLE: dict[str, Treatment] = {
    **_POSTS,
    "/v1/models": Treatment.MODELS,
    **dict.fromkeys(_WHOLE, Treatment.WHOLE),
    **dict.fromkeys(_REFUSED, Treatment.REFUSED),
}


def normalise(path: str) -> str:
    """The path as the engine's router will see it: no query, percent-decoded, ``//``, ``.``, ``..`` and a last ``/`` gone.

    Done here as well as in Envoy, because in a mesh the Envoy is not ours.
    """
    decoded = unquote(path.partition("?")[0].partition("#")[0])
    kept: list[str] = []
    for segment in decoded.replace("\\", "/").split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    return "/" + "/".join(kept)


def treatment(method: str, path: str) -> Treatment:
    """``("POST", "/v1/completions?x=1")`` -> ``Treatment.COMPLETIONS``.

    Prefill and decode are taken apart only for the exact spelling: both legs must reach the same handler, and for any other
    spelling that depends on the engine's router. Control endpoints are refused in every spelling,
    and so is CONNECT, whose body has no end.
    """
    exact = TABLE.get(path.partition("?")[0], Treatment.REFUSED)
    if exact.apart:
        return exact if method == "POST" else Treatment.WHOLE
    if exact is Treatment.MODELS:
        return exact if method == "GET" else Treatment.WHOLE
    if exact is Treatment.WHOLE:
        return exact
    if method == "CONNECT":
        return Treatment.REFUSED
    clean = normalise(path).lower()
    refused = TABLE.get(clean) is Treatment.REFUSED or any(clean.startswith(f"{prefix}/") for prefix in _REFUSED)
    return Treatment.REFUSED if refused else Treatment.WHOLE
