"""The ``flowmill`` command. Heavy imports happen inside commands, so that ``--help`` is fast."""

from __future__ import annotations

import sys

from flowmill.configs.gc_tuning import collect_rarely
from flowmill.configs.import_paths import user_folder_last
from flowmill.flows.cli.app import app
from flowmill.flows.cli.error_reporting import refuse_bare_settings, refuse_empty, report_errors
from flowmill.flows.environment import prepare_environment

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an expected error is one message on standard error and exit code 1, without traceback."""
    collect_rarely()
    # Custom rewards and models are imported from the working directory, last in the path.
    user_folder_last()
    with report_errors():
        prepare_environment()
        refuse_empty(sys.argv[1:])
        refuse_bare_settings(sys.argv[1:])
        app(prog_name="flowmill")
