"""Several pools of workers behind one gateway: which worker and which request belongs where, and how Envoy is told."""
