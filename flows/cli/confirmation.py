"""Asks before a change that cannot be undone."""

from __future__ import annotations

import sys

import typer

from flowmill.configs.errors import CancelledError, ConfigError


def confirm(question: str, *, unasked: str, declined: str) -> None:
    """Ask for confirmation on the terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(unasked)
    if not typer.confirm(question):
        raise CancelledError(declined)
