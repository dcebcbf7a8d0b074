"""What is wrong with what was asked for."""


class BenchError(ValueError):
    """A run that cannot be; says what was wrong, and where."""
