"""vLLM's bidirectional transfer: blocks that a decode worker keeps after an answer, for the prefill of the next turn.

A decode worker with ``bidirectional_kv_xfer`` names its blocks in the answer (vLLM 0.32). A prefill worker that is given them
reads the first ``remote_num_tokens`` tokens of its prompt from there, and compares nothing. So all the care is here:

* ``answer``: takes them, and the token ids, out of the answer's body, so that no client ever sees them (pure);
* ``reading``: one answer on its way through the filter;
* ``store``: keeps them, bounded and for a time, and gives them to one prompt that begins with exactly their tokens.
"""
