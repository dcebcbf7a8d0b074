"""TLS from us to others: what a configuration says of it, files that are read again when they change, how workers are reached.

The server side is :mod:`extproc.transport`'s.
"""
