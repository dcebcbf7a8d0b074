"""Baton: an Envoy external-processing filter for prefill/decode disaggregated LLM serving on vLLM."""

__version__ = "0.1.0"
