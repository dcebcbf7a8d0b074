"""What Baton sees of the workers, and what it shows of itself."""
