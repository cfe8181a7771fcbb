"""The ``flowmill`` command. Heavy imports happen inside commands, so that ``--help`` is fast."""

from __future__ import annotations

import sys

from configs.gc_tuning import collect_rarely
from configs.import_paths import user_folder_last
from flows.cli.app import app
from flows.cli.error_reporting import refuse_bare_settings, refuse_empty, report_errors
from flows.environment import prepare_environment

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; a known error is one message on standard error and exit code 1, without a traceback."""
    prepare_environment()
    collect_rarely()
    # Custom rewards and models are imported from the working directory, last in the path.
    user_folder_last()
    with report_errors():
        refuse_empty(sys.argv[1:])
        refuse_bare_settings(sys.argv[1:])
        app(prog_name="flowmill")
