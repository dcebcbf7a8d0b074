"""Routing policies against each other and against peers: real request traces, simulated engines, everything else real."""
