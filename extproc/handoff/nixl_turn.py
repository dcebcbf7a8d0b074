"""NIXL, pull, the other way: a decode worker's blocks for the prefill of the next turn. Facts are those of vLLM 0.32.

What the engines do not look after is looked after here:

* Where the prefill worker has the beginning in its own cache, it takes the *last* of the remote blocks. The decode worker names
  all blocks that it had allocated, which may be more than its tokens fill (room for guessed tokens); then every block would be
  read in the place of another. So blocks behind the tokens are cut off, for which their size must be known.
* The last token that was generated counts as computed while the step that writes its KV is still running (asynchronous
  scheduling). So it is never read.
* Models whose layers keep their KV in several groups cannot be cut like that, nor can ranks that share the tokens of a block.
"""

from __future__ import annotations

import msgspec

from extproc.handoff import Handoff, HandoffError
from extproc.handoff.remote_hosts import RemoteHosts, host_fault

_Fields = dict[str, msgspec.Raw]


class _Params(msgspec.Struct, frozen=True):
    do_remote_decode: bool
    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int
    dcp_size: int = 1
    transfer_mode: str = "pull"


_params_decoder = msgspec.json.Decoder(_Params)
_fields_decoder = msgspec.json.Decoder(_Fields)
_encode = msgspec.json.Encoder().encode


class KeptBlocks:
    """Blocks that a decode worker keeps after an answer, as its ``kv_transfer_params`` name them. Never shown: no repr."""

    __slots__ = ("_blocks", "_fields", "decode", "engine_id", "request_id", "tokens")

    def __init__(self, raw: bytes, decode: str, hosts: RemoteHosts) -> None:
        """``raw``: of the answer of ``decode`` (``ip:port``). Raises HandoffError for what cannot be read safely."""
        try:
            params = _params_decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            raise HandoffError("kv_transfer_params of an answer cannot be read") from None
        fault = host_fault(params.remote_host, params.remote_port) or hosts.fault(params.remote_host, decode)
        if fault is None and not params.do_remote_decode:
            fault = "do_remote_decode is not true"
        if fault is None and (len(params.remote_block_ids) != 1 or params.dcp_size != 1 or params.transfer_mode != "pull"):
            fault = "several groups of blocks, or a transfer that is not a pull"
        if fault is None and not (params.remote_block_ids[0] and params.remote_num_tokens > 0):
            fault = "no blocks"
        if fault is not None:
            raise HandoffError(f"kv_transfer_params of an answer: {fault}")
        self._fields = _fields_decoder.decode(raw)
        self._blocks = params.remote_block_ids[0]
        self.decode = decode
        self.engine_id = params.remote_engine_id
        self.request_id = params.remote_request_id
        self.tokens = params.remote_num_tokens
        """So many are in the blocks, as the engine says."""

    def prefill_params(self, tokens: int, block_tokens: int, prompt_token_ids: bytes | None) -> bytes:
        """``kv_transfer_params`` of a prefill whose first ``tokens`` tokens are read from these blocks of ``block_tokens``.

        ``prompt_token_ids``: a JSON list, for the API that takes them here. Raises HandoffError where the blocks cannot hold
        those tokens.
        """
        blocks = -(-tokens // block_tokens)
        if not 0 < tokens <= self.tokens or blocks > len(self._blocks):
            raise HandoffError(f"{tokens} tokens in {len(self._blocks)} blocks of {block_tokens}")
        fields = {
            **self._fields,
            **_way(to_prefill=True),
            "remote_block_ids": msgspec.Raw(_encode([self._blocks[:blocks]])),
            "remote_num_tokens": msgspec.Raw(_encode(tokens)),
        }
        if prompt_token_ids is not None:
            fields["prompt_token_ids"] = msgspec.Raw(prompt_token_ids)
        return _encode(fields)

    def release(self) -> Handoff:
        """The same as a handoff that nobody fetches: who turns down a request that has it lets the decode worker let go."""
        return Handoff(
            connector="nixl",
            prefill=self.decode,
            params=_encode({**self._fields, **_way(to_prefill=False)}),
            engine_id=self.engine_id,
            request_id=self.request_id,
            releasable=True,
        )


class _Place(msgspec.Struct, frozen=True):
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int


_place_decoder = msgspec.json.Decoder(_Place)


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer_decoder = msgspec.json.Decoder(_Answer)


def kept_after(answer: bytes, decode: str, hosts: RemoteHosts) -> Handoff | None:
    """Blocks that ``decode`` keeps after this answer of its, to be released; None: it names none."""
    try:
        raw = bytes(_answer_decoder.decode(answer).kv_transfer_params)
    except (msgspec.DecodeError, RecursionError):
        return None
    return release_of(raw, decode, hosts)


def release_of(raw: bytes, decode: str, hosts: RemoteHosts) -> Handoff | None:
    """The same as :meth:`KeptBlocks.release`, of blocks that cannot be read; None: not even that can be said of them."""
    try:
        place = _place_decoder.decode(raw)
        fields = _fields_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if host_fault(place.remote_host, place.remote_port) or hosts.fault(place.remote_host, decode):
        return None
    return Handoff(
        connector="nixl",
        prefill=decode,
        params=_encode({**fields, **_way(to_prefill=False)}),
        engine_id=place.remote_engine_id,
        request_id=place.remote_request_id,
        releasable=True,
    )


def _way(*, to_prefill: bool) -> _Fields:
    yes, no = msgspec.Raw(b"true"), msgspec.Raw(b"false")
    return {"do_remote_decode": yes if to_prefill else no, "do_remote_prefill": no if to_prefill else yes}
