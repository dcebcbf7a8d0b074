"""The arithmetic of ``baton plan`` against throughputs that others have measured on GPUs and published."""
