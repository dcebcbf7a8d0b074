"""What workers publish about their KV caches, over ZMQ, into :mod:`extproc.routing.holdings`.

settings (the section of the configuration), addresses (where a worker publishes), events (their fields), decode (bytes ->
events), long_events (the same in pieces), sequence (which batch is next; pure), entering (a batch into the holdings), plain
(the same for a batch as most are), sockets (ZMQ's), follower (one publisher), subscriber (all of them, and what is told of
them).
"""
