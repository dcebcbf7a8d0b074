"""A long run under load: does anything grow?"""
