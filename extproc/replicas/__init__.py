"""Filters on different hosts that know of each other what processes of one host do (:mod:`extproc.processes`).

The same ledger (:class:`~extproc.processes.ledger.SharedLedger`) over another carrier: TCP between each two of them.

**Who the others are** (:mod:`.peers`): a list, a DNS name, or both. Both sides dial; the second connection between two is
closed. An address that leads to ourselves is left out once it has answered with our own epoch.

**Who may speak** (:mod:`.handshake`): each side says hello with a nonce, and proves that it knows the shared secret for these
two hellos. From then on every frame (:mod:`.frames`) has a number and a code under a key of this one connection, so nothing can
be put in, left out or sent again. TLS with certificates of both sides (:mod:`.keys`) hides it, and can stand alone. Without TLS
the setting must say so, and a secret is needed: whoever could lie here could send all prompts to one worker.

**Times.** Clocks of hosts have nothing to do with each other. Each batch says what its sender's clock shows, and times in it
are taken by their age: what the message took on its way makes them younger by as much.

**Versions.** A hello says which versions of the format its sender speaks; the highest common one is spoken. Without one the two
refuse each other, say so in the log once, and try again now and then: an upgrade with a new format goes on, blind in between.

**Alone.** Whoever is silent for ``silence_s``, or whose connection ends, has no share in the ledger any more. What its requests
do on the workers then counts by what the workers report, as between filters that never met.

**What each does for itself**: probes and scrapes of workers, Envoy's endpoint files, its queue and the shares of tenants in it.
First handoffs are made by the one that leads: the lowest epoch, which is drawn at the start.
"""
