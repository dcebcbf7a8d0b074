"""HTTP/2 for a server of known peers, in plaintext with prior knowledge (RFC 9113 section 3.3). No I/O in this package.

``connection.Connection`` takes bytes and gives bytes; what it learns goes to a ``Receiver``.
"""
