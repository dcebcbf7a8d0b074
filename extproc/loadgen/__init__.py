"""``baton bench``: requests at their own times, whatever becomes of those before them, and how well they were served."""
