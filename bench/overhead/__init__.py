"""What it costs to have Baton, or a peer, between clients and workers that answer at once."""
