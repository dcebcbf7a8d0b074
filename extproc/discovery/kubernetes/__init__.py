"""Workers found in Kubernetes: pods by label, pods of an InferencePool, the endpoints of a Service. See ``docs/kubernetes.md``.

:mod:`.settings` is what an operator says, :mod:`.workers` (pure) what follows from it for a pod, :mod:`.sources` joins both
with what the API server says; :mod:`.reflector` lists and watches, over :mod:`.api`, with the credentials of :mod:`.access`.
"""
