"""Random faults at every phase of a few thousand requests, and what must hold all the same."""
