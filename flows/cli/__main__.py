"""``python -m flowmill.flows.cli`` is ``flowmill``."""

from flowmill.flows.cli import main

main()
