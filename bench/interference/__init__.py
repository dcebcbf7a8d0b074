"""What long prompts do to streams that are being written: colocated, colocated with chunked prefill, and apart, by Baton."""
