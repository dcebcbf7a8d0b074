"""How fast workers are, learned from what was observed. Every figure starts from a first guess and moves with evidence."""

from __future__ import annotations

import math

_KEEP = 0.99
"""Weight that all earlier prompts keep with each new one: about the last hundred count."""

_PRIOR_S = 2.0
"""The first guess counts as much as so many seconds of observed prefill."""

_TYPICAL_CONTEXT_TOKENS = 8192.0

_SAME_STEP_S = 0.005
"""Replies closer together than this came out of one scheduler step."""


class PrefillRate:
    """Seconds that a prefill takes: linear in the tokens to compute, and in what each of them attends to.

    ``seconds = a * uncached + b * uncached * context``, with the mean context of the computed tokens,
    ``cached + uncached / 2``. Both are fitted by least squares with a decaying memory; neither may be negative.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._a, self._b = 1.0 / tokens_per_s, 0.0
        # Normal equations, begun with a first guess that says: linear.
        size = _PRIOR_S * tokens_per_s
        self._uu, self._uq, self._qq = size, 0.0, size * _TYPICAL_CONTEXT_TOKENS**2 * 0.01
        self._us, self._qs = size / tokens_per_s, 0.0

    def seconds(self, uncached: float, cached: float = 0.0) -> float:
        """What computing ``uncached`` tokens behind ``cached`` ones takes."""
        return uncached * (self._a + self._b * (cached + uncached / 2))

    @property
    def tokens_per_s(self) -> float:
        """For short prompts."""
        return 1.0 / max(self._a + self._b * _TYPICAL_CONTEXT_TOKENS / 2, 1e-9)

    def note(self, uncached: float, context_sum: float, seconds: float) -> None:
        """``uncached`` tokens, attending to ``context_sum`` tokens together, took ``seconds``."""
        if uncached <= 0 or seconds <= 0:
            return
        # Weighted by 1/uncached: the error of a prompt grows with its size, and a long one must not drown the others.
        u, q, s = uncached, context_sum, seconds
        w = 1.0 / u
        self._uu = self._uu * _KEEP + w * u * u
        self._uq = self._uq * _KEEP + w * u * q
        self._qq = self._qq * _KEEP + w * q * q
        self._us = self._us * _KEEP + w * u * s
        self._qs = self._qs * _KEEP + w * q * s
        self._solve()

    def _solve(self) -> None:
        determinant = self._uu * self._qq - self._uq * self._uq
        if determinant > 1e-9 * self._uu * self._qq:
            a = (self._us * self._qq - self._qs * self._uq) / determinant
            b = (self._uu * self._qs - self._uq * self._us) / determinant
            if a > 0 and b >= 0:
                self._a, self._b = a, b
                return
        if self._uu > 0:
            self._a, self._b = max(self._us / self._uu, 1e-9), 0.0


class PrefillMeter:
    """Turns the replies of one worker into observations: what it did, and how long it had for it."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._began_s = -math.inf
        self._uncached = self._context = 0.0

    def reply(self, rate: PrefillRate, *, sent_s: float, now_s: float, uncached: float, cached: float) -> None:
        """A reply came. The worker began with it when it was sent, or when the one before was done."""
        began_s = max(sent_s, self._last_s)
        if now_s - self._last_s > _SAME_STEP_S:
            self._flush(rate)
            self._began_s = began_s
        self._uncached += uncached
        self._context += uncached * (cached + uncached / 2)
        self._last_s = now_s

    def passed(self, rate: PrefillRate, *, sent_s: float, now_s: float) -> float:
        """A reply came that tells nothing of computing, e.g. because most of its time went into loading: seconds it took."""
        began_s = max(sent_s, self._last_s)
        self._flush(rate)
        self._began_s = self._last_s = now_s
        return now_s - began_s

    def _flush(self, rate: PrefillRate) -> None:
        if self._uncached:
            rate.note(self._uncached, self._context, self._last_s - self._began_s)
        self._uncached = self._context = 0.0


class Ewma:
    """A mean in which the last observations count most."""

    __slots__ = ("value", "weight")

    def __init__(self, first_guess: float, weight: float = 0.1) -> None:
        self.value = first_guess
        self.weight = weight

    def note(self, observed: float) -> None:
        """One observation."""
        self.value += self.weight * (observed - self.value)


class DecodeRate:
    """The time between two tokens of a worker, by what it runs: ``step + each * sequences + token * kv_tokens``.

    A step reads the weights once, and the KV of every token that a sequence in it attends to.

    One scale is learned on top of the first guess: a report, a mean over all batches of its interval, holds no more.
    """

    def __init__(self, step_s: float, each_s: float, token_s: float = 0.0) -> None:
        self._step_s = step_s
        self._each_s = each_s
        self._token_s = token_s
        self._scale = Ewma(1.0)

    def itl_s(self, sequences: float, kv_tokens: float = 0.0) -> float:
        """With so many sequences in the batch, which have so many tokens together."""
        return self._scale.value * self._guess_s(sequences, kv_tokens)

    def longer_s(self, sequences: float, kv_tokens: float, own_tokens: float) -> float:
        """What one more sequence of ``own_tokens`` waits for a token beside so many others, over what it would alone."""
        scale, step_s, each_s, token_s = self._scale.value, self._step_s, self._each_s, self._token_s
        among_s = step_s + each_s * (sequences + 1) + token_s * (kv_tokens + own_tokens)
        return scale * among_s - scale * (step_s + each_s + token_s * own_tokens)

    def _guess_s(self, sequences: float, kv_tokens: float) -> float:
        return self._step_s + self._each_s * sequences + self._token_s * kv_tokens

    def note(self, sequences: float, itl_s: float, kv_tokens: float = 0.0) -> None:
        """What a worker reported."""
        guess = self._guess_s(sequences, kv_tokens)
        self._scale.note(min(max(itl_s / guess, 0.05), 20.0))


class TransferRate:
    """Seconds that KV blocks take to a decode worker: ``bytes / bandwidth``, learned from its reports.

    Sums that fade, not a mean of quotients: a transfer of a few blocks takes its overhead, and says little about bandwidth.
    """

    _KEEP = 0.95
    _GUESS_BYTES = 1e9
    """What the first guess weighs."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes = self._GUESS_BYTES
        self._seconds = self._GUESS_BYTES / bytes_per_s

    def copy(self) -> TransferRate:
        """One that begins with what this one has learned, as a first guess."""
        return TransferRate(self._bytes / self._seconds)

    def seconds(self, size_bytes: float) -> float:
        """For so many bytes."""
        return size_bytes * self._seconds / self._bytes

    def note(self, size_bytes: float, seconds: float) -> None:
        """A transfer of ``size_bytes`` took ``seconds``, or the mean of several."""
        if size_bytes > 0 and seconds > 0:
            self._bytes = self._bytes * self._KEEP + size_bytes
            self._seconds = self._seconds * self._KEEP + seconds
