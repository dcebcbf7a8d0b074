"""How cost grows with what is asked: ``python -m bench.growth``."""
