"""How long an engine step and a transfer take, from a hardware profile. Pure arithmetic.

The default profile is derived, not measured: one worker is two H200 (tensor parallel) serving a Llama-3-70B-class model with
FP8 weights and a BF16 KV cache. From NVIDIA's H200 SXM data sheet: 1,979 TFLOPS dense FP8 and 4.8 TB/s HBM3e a GPU, 141 GB.
From the published model card: 70.6e9 parameters, 80 layers, hidden size 8,192, 8 KV heads of 128. Assumed, and typical of what
serving engines reach: 45 % of the peak FLOPS in prefill, 60 % of the peak bandwidth in decode, 2 ms a step for launching and
scheduling, one 400 Gb/s port a GPU at 80 % for transfers, and PCIe 5.0 x16 (63 GB/s each way) a GPU at 80 % for what comes from
the host's memory. That gives about 12,600 prompt tokens/s at short contexts, 14 ms a decode step for a small batch, 4.1 ms to
transfer 1,000 tokens, and 3.3 ms to load them from the host.

A step with prefill tokens in it delays the decodes that share it: that is how a colocated worker stalls its streams.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """One worker's hardware and model."""

    parameters: float = 70.6e9
    weight_bytes: float = 70.6e9
    expert_bytes: float = 0.0
    """Of these, routed experts, of which a step reads those that its tokens go to."""
    expert_share: float = 1.0
    """Of the experts of a layer, how many a token goes to."""
    layers: int = 80
    hidden: int = 8192
    kv_bytes_a_token: int = 80 * 8 * 128 * 2 * 2
    kv_copies: int = 1
    """How often the worker's GPUs hold, read and receive the same KV: more GPUs than KV heads have copies of a head."""
    flops_a_s: float = 2 * 1979e12 * 0.45
    memory_bytes_a_s: float = 2 * 4.8e12 * 0.60
    step_overhead_s: float = 0.002
    transfer_bytes_a_s: float = 2 * 50e9 * 0.80
    transfer_overhead_s: float = 0.002
    host_bytes_a_s: float = 2 * 63e9 * 0.80
    host_overhead_s: float = 0.002
    handshake_s: float = 5.0
    """The first transfer between two engines. Reports on NIXL speak of about five seconds."""
    attention_apart: bool = False
    """Whether the kernels of a step run one after the other: the linear layers of all its tokens, which read the weights once,
    then attention of the prefills, then that of the decodes, which reads their KV. False: arithmetic and reading overlap
    wholly, and a step takes the longer of the two. They differ where prefills and decodes share a step."""

    def step_s(self, *, prefill_tokens: int, prefill_context_tokens: int, decodes: int, decode_context_tokens: int) -> float:
        """One engine step.

        ``prefill_context_tokens`` is the sum over all prefill tokens of the tokens that each attends to, and
        ``decode_context_tokens`` the same over the decodes: attention's work in a prefill, the KV to be read in a decode.
        """
        tokens = prefill_tokens + decodes
        if not tokens:
            return 0.0
        flops = self.step_flops(tokens=tokens, prefill_context_tokens=prefill_context_tokens)
        read_bytes = self.step_bytes(tokens=tokens, decode_context_tokens=decode_context_tokens)
        if self.attention_apart:
            linear_flops = self.step_flops(tokens=tokens, prefill_context_tokens=0)
            weight_bytes = self.step_bytes(tokens=tokens, decode_context_tokens=0)
            linear_s = max(linear_flops / self.flops_a_s, weight_bytes / self.memory_bytes_a_s)
            prefill_s = (flops - linear_flops) / self.flops_a_s
            return self.step_overhead_s + linear_s + prefill_s + (read_bytes - weight_bytes) / self.memory_bytes_a_s
        return self.step_overhead_s + max(flops / self.flops_a_s, read_bytes / self.memory_bytes_a_s)

    def step_flops(self, *, tokens: int, prefill_context_tokens: int) -> float:
        """Work of a step: each token, prefilled or decoded, meets each weight, and the prefilled ones their contexts."""
        return 2 * self.parameters * tokens + 4 * self.layers * self.hidden * prefill_context_tokens

    def step_bytes(self, *, tokens: int, decode_context_tokens: int) -> float:
        """What a step reads: its weights once, and the KV of what it decodes.

        Of routed experts, those that one of ``tokens`` tokens goes to, where all are as likely as the others and tokens choose
        for themselves: an assumption, and few tokens that are alike read less.
        """
        kv_bytes = self.kv_bytes_a_token * self.kv_copies * decode_context_tokens
        if not self.expert_bytes:
            return self.weight_bytes + kv_bytes
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** tokens + kv_bytes

    def load_s(self, tokens: int) -> float:
        """Copying the KV of ``tokens`` tokens from the host's memory."""
        return self.host_overhead_s + tokens * self.kv_bytes_a_token * self.kv_copies / self.host_bytes_a_s

    def transfer_s(self, tokens: int) -> float:
        """Moving the KV of ``tokens`` tokens to another worker, once the two know each other."""
        return self.transfer_overhead_s + tokens * self.kv_bytes_a_token * self.kv_copies / self.transfer_bytes_a_s
