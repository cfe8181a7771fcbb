"""The ``flowmill`` command. Heavy imports happen inside commands, so that ``--help`` is instant."""

from __future__ import annotations

import sys

from configs.garbage import collect_rarely
from configs.packages import user_folder_last
from flows.cli import making, showing
from flows.cli.app import app
from flows.cli.opening import last_words, refuse_bare_settings, refuse_empty
from flows.environment import prepare_environment

__all__ = ["app", "main", "making", "showing"]


def main() -> None:
    """Run the command line; a mistake is one message on standard error and exit code 1, without a traceback."""
    prepare_environment()
    collect_rarely()
    # Rewards and models of your own are found in the folder you work in, after all else.
    user_folder_last()
    with last_words():
        refuse_empty(sys.argv[1:])
        refuse_bare_settings(sys.argv[1:])
        app(prog_name="flowmill")
