"""``baton plan``: arithmetic and simulation for decisions about hardware. Nothing here is on a request's way.

Facts (``gpus``, ``links``, ``models/``) name their source; what is not measured or published is called an assumption.
"""
