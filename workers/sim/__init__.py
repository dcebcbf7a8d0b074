"""The strict simulated engine: a vLLM without a GPU that forgives nothing.

It speaks vLLM's HTTP API, keeps a real ledger of KV blocks, and computes its answers from what those blocks hold: a decode
that reads freed, reused or foreign blocks streams wrong text with status 200, as vLLM does. What was wrong is counted.

The pure parts (no I/O, no clock of their own): tokens, template, text, hashing, blocks, handoff, timing, request, core,
fields, sampling, prompts, violations, faults. The rest (engine, side_channel, events, metrics, api_*, worker, main) does I/O.
"""
