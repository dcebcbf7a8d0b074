"""The decision: which workers serve a request. Pure: no I/O, no clock of its own, no globals; imports nothing of ours."""
