"""The first and the last words of a command, written before and after anything heavy."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from typer.core import TyperGroup

from configs.errors import FlowmillError
from flows.environment import wants_traceback

#: Exit codes of the signals that stop a command in an orderly way, and what sends them.
STOPPED = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}


class CommandGroup(TyperGroup):
    """Commands in which Ctrl-C ends like SIGTERM does: as an exit that carries what there is to say about it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command.

        Raises:
            SystemExit: 130 when Ctrl-C was pressed.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise carrying(SystemExit(128 + signal.SIGINT), stop) from None


def say(text: str, *, quiet: bool = False) -> None:
    """Write a line at once, so that a person knows the command is at work before its libraries are there."""
    if not quiet:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def carrying(end: SystemExit, stop: BaseException) -> SystemExit:
    """Return an exit with the notes of what caused it."""
    for note in notes(stop):
        end.add_note(note)
    return end


def notes(error: BaseException) -> list[str]:
    """Return the notes of an error and of what it came from."""
    return [*getattr(error, "__notes__", [])]


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into the orderly exit that Ctrl-C takes."""

    def stop(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """End a command: a mistake is one message and exit code 1; a signal says what stays and how to go on."""
    try:
        with terminable():
            yield
    except FlowmillError as error:
        if error.__cause__ is not None and wants_traceback():
            traceback.print_exception(error)
        sys.stderr.write(f"flowmill: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt as stop:
        _stopped(carrying(SystemExit(128 + signal.SIGINT), stop))
    except SystemExit as end:
        if end.code in STOPPED:
            _stopped(end)
        raise


def _stopped(end: SystemExit) -> NoReturn:
    """Say what a stopped command leaves and how to go on, and exit."""
    arguments = sys.argv[1:]
    works = arguments[:1] in (["run"], ["stage"], ["store"])
    lines = [f"flowmill: stopped by {STOPPED[int(end.code or 0)]}.", *notes(end)]
    if works:
        lines.append("What is committed stays. To go on, give the same command again:")
        lines.append(f"  {shlex.join(['flowmill', *arguments])}")
    sys.stderr.write("\n".join(lines) + "\n")
    raise end
