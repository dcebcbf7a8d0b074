"""How Envoy's gRPC calls reach the filter: one small interface (:mod:`extproc.transport.call`), and two ways to carry it."""
