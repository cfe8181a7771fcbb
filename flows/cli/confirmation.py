"""Asks before a change that cannot be undone."""

from __future__ import annotations

import sys

import typer

from configs.errors import CancelledError, ConfigError


def confirm(question: str, *, unasked: str, declined: str) -> None:
    """Ask for confirmation on the terminal.

    Raises:
        ConfigError: standard input is no terminal; the message is ``unasked``.
        CancelledError: the user declined; the message is ``declined``.
    """
    if not sys.stdin.isatty():
        raise ConfigError(unasked)
    if not typer.confirm(question):
        raise CancelledError(declined)
