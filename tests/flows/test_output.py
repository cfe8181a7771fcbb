"""A reader of standard output that goes away, as ``head`` does, ends no command and no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
from rich.table import Table

from flowmill.flows.cli.error_reporting import say
from flowmill.flows.console import _Console, print_json, print_table
from flowmill.flows.output import write
from flowmill.flows.progress import Lines


@pytest.mark.parametrize(
    "output",
    [
        partial(say, "reading"),
        partial(print_json, {"run": "small"}),
        partial(print_table, Table("run")),
        partial(Lines(3).message, "epoch 1"),
    ],
    ids=["say", "json", "table", "progress"],
)
@pytest.mark.parametrize("has_errors", [True, False])
def test_a_closed_pipe_ends_nothing(
    output: Callable[[], None], has_errors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("flowmill.flows.progress.console", _Console())
    with os.fdopen(writer, "w") as pipe, os.fdopen(os.dup(writer), "w") as same:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", same if has_errors else None)
        output()
        output()
        assert os.path.samestat(os.fstat(pipe.fileno()), os.stat(os.devnull))
        assert os.path.samestat(os.fstat(same.fileno()), os.stat(os.devnull)) is has_errors


def test_errors_are_printed_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    (reader, writer), (errors, error_writer) = os.pipe(), os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, os.fdopen(error_writer, "w") as stderr:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", stderr)
        write("lost\n", pipe)
        sys.stderr.write("flowmill: refused")
    with os.fdopen(errors) as text:
        assert text.read() == "flowmill: refused"
