"""Several filter processes on one machine that decide like one: more cores for the same workers and the same Envoy.

A process of Python uses one core. ``baton serve --processes N`` is a parent that starts N filters and does nothing else
(:mod:`~extproc.processes.parent`). Each listens on an address of its own (:mod:`~extproc.processes.member`), and Envoy has
all of them as endpoints of one cluster: least request, a health check each. One listening socket for all (``SO_REUSEPORT``)
would not do: Envoy multiplexes its streams over one HTTP/2 connection, and they would all be in one process.

**One ledger.** Each process keeps the whole ledger: its own claims, and those of its siblings, as claims in the same legs of
the same pool. So a decision is made like in one process, by the same code, with the load of all. What a process does it tells
the others (:mod:`~extproc.processes.facts`): claims taken and given back, prefixes that workers hold, replies of prefill
workers (from which speeds are learned), failures, pairs that have met, conversations, what the leader's scrapes say.

**Unix datagrams** carry it (:mod:`~extproc.processes.post`), in a folder that only the parent's user can enter: no connection
to be kept, one system call for all that happened in a turn of the event loop, and nobody waits for anybody: a sibling that
does not read costs a bounded buffer. Batches are numbered. Whoever misses one, starts, or was silent for two seconds is told
the claims as a whole again, under which those that he knows stay and others go: the ledger heals by itself. A process that is
gone takes its claims with it, at once where the kernel says so (its socket is closed), else after two seconds of silence.

**What is exact, what is not.** A process knows of a sibling's decision about a millisecond later. Two that decide within it
may both fill the last room of a worker: a prefill worker can have one prompt more than its window for each other process. The
queue of prompts that wait for a worker is each process's own. Where a worker gets room, it is for the prompt that would be
first in one queue of all (band, still in time, time of coming), and the other processes leave it that for 5 ms; shares of
tenants hold within a process only. Limits (``limits``, ``queue_requests``, ``queue_bytes``, ``prefill.max_concurrent``) are
those of one process; ``max_in_flight`` of a policy holds for all. How many bytes a token has, each process learns by itself.

**When.** A claim goes out at once, other facts within 10 ms or with the next claim, or at once while a sibling has a prompt
that waits: a datagram costs more than what is in it.

**The leader** is the lowest process that knows its workers. It writes Envoy's endpoint files, makes first handoffs and
scrapes the workers: N times the load on every worker would buy nothing, and their counters would be counted N times. Every
process still probes who is live by itself, because its own view of a worker must not hang on another process.

**Envoy's access log** reaches any of the processes; a line's key says whose it is, and it is passed on.

Not needed, then: requests of one prefix or session in the same process. Who would do without the ledger has to hash by a
header in Envoy, which no client sets by itself, and which a large tenant breaks.
"""
