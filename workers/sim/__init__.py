"""The strict simulated engine: a vLLM without a GPU that forgives nothing.

It speaks vLLM's HTTP API, keeps a real ledger of KV blocks, and computes its answers from what those blocks hold: a decode
that reads freed, reused or foreign blocks streams wrong text with status 200, as vLLM does. What was wrong is counted.

The pure parts (no I/O, no clock of their own): tokens, template, text, hashing, blocks, handoff, timing, request, core,
fields, sampling, prompts, errors, violations, faults, histogram. Around them: engine (the loop), side_channel (the wire between
workers), events (ZMQ), metrics, serving (one request's way) with an api_* for each family of endpoints, worker, and local,
options and main for starting several.
"""
