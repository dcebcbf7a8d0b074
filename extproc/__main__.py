"""``python -m extproc`` is ``baton``."""

from extproc.cli import main

main()
