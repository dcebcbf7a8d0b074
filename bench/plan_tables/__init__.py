"""``make plan-tables``: published goodput of five arrangements of 64 GPUs, against the same five in the twin."""
