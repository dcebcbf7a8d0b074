"""TLS at the gRPC port: what the server shows of itself, whom it lets in, and how connections come to be.

The client side is :mod:`extproc.tls`'s.
"""
