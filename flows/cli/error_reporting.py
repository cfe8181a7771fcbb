"""The first message and the error messages of a command, printed without heavy imports."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NoReturn

from flowmill.configs.errors import ConfigError, FlowmillError, disk_in_words
from flowmill.configs.escaping import command, quoted, visible
from flowmill.configs.exits import StopSignal
from flowmill.flows.cli.signals import STOPPED, terminable
from flowmill.flows.environment import wants_traceback
from flowmill.flows.output import write

_LINES = "\n\t"
_SECTIONS = "run|store|model|prompts|rollout|rewards|monitors|advantage|optimize|evaluate|export|tracking|execution"
_EMPTY = re.compile(r"--[\w-]+=")
_SETTING = re.compile(rf"\+{{0,2}}({_SECTIONS})(\.\w+)*=")


def say(text: str, *, quiet: bool = False) -> None:
    """Write a line immediately, to show that the command is running before its libraries are loaded."""
    if not quiet:
        write(f"{visible(text)}\n", sys.stdout)


def refuse_bare_settings(arguments: Sequence[str]) -> None:
    """Refuse ``section.key=value`` without ``--set``, the syntax of other programs, with a ConfigError."""
    for before, argument in pairwise(["", *arguments]):
        if _SETTING.match(argument) and not before.startswith("-"):
            setting = argument.lstrip("+")
            raise ConfigError(f"'{argument}' is a setting, and those are given with --set: --set {quoted(setting)}")


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse empty arguments and options with a ConfigError: an empty path would mean the working directory."""
    for before, argument in pairwise(["", *arguments]):
        if not argument or _EMPTY.fullmatch(argument):
            option = argument.rstrip("=") or (before if before.startswith("-") else "")
            label = f"{option} is empty" if option else "An argument is empty"
            raise ConfigError(f"{label}: it names nothing. Omit it, or give it a value; a variable may be unset.")


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Print errors inside the block as one message with exit code 1, and after a signal the command to continue."""
    try:
        with terminable():
            yield
    except (FlowmillError, OSError) as error:
        if wants_traceback() and not (isinstance(error, FlowmillError) and error.__cause__ is None):
            sys.stderr.write(visible("".join(traceback.format_exception(error)), keep=_LINES))
        text = str(error) if isinstance(error, FlowmillError) else disk_in_words(error)
        sys.stderr.write(f"flowmill: {visible(text, keep=_LINES)}\n")
        sys.exit(1)
    except StopSignal as end:
        _stopped(end)


def _stopped(end: StopSignal) -> NoReturn:
    """Print the progress of a stopped command and how to continue it, and exit."""
    arguments = sys.argv[1:]
    works = arguments[:1] in (["run"], ["stage"], ["store"], ["sweep"])
    lines = [f"flowmill: stopped by {STOPPED[int(end.code or 0)]}.", *getattr(end, "__notes__", [])]
    if works:
        lines.append("Committed data stays. To go on, give the same command again:")
        lines.append(f"  {command('flowmill', *arguments)}")
    sys.stderr.write(visible("\n".join(lines), keep=_LINES) + "\n")
    raise end
