"""Benchmarks: each one command, each printing a table."""
