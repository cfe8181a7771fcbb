"""``python -m flows.cli`` is ``flowmill``."""

from flows.cli import main

main()
