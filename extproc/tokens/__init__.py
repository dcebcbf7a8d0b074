"""From a request to the token ids that the engine will have of it, off the event loop and within a bound.

Where they come from, in the order in which they are tried: the client sent them; a prefill replied with them before; the
model's own tokenizer; a worker is asked; the beginning is known from an earlier turn. See docs/tokens.md.
"""
