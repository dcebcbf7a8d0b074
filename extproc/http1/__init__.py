"""A small HTTP/1.1 client for many short POSTs to known peers: see :mod:`extproc.http1.pool`.

It speaks what RFC 9110 and RFC 9112 ask of a client, as far as such calls need it: one request at a time on a connection, no
pipelining, no redirects, no cookies, no content codings. The answers are read by llhttp, through `httptools`.
"""
