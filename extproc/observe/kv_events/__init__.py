"""What workers publish about their KV caches, over ZMQ, into :mod:`extproc.routing.holdings`.

settings (the section of the configuration), addresses (where a worker publishes), decode (bytes -> events), sequence (which
batch is next; pure), follower (one publisher: its sockets), subscriber (all of them, and what is told of them).
"""
