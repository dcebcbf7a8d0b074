"""Measure the way between two nodes: one serves a buffer, the other reads it in blocks, as a decode worker does.

The work is done by a process of its own (:mod:`workers.preflight.measure.__main__`): native code that hangs is ended
with it, and UCX reads its environment there.
"""
