"""Fixtures of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.configs.load import load_config
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.describe import describe_result
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import mark_finished
from flowmill.tasks.runs.state import note_state
from tests.support.inside import evaluate, prepare, run_epoch, run_stage
from tests.support.small import small_data, write_small


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> tuple[RunContext, Path]:
    """A finished run of one epoch, which no test changes, and its config; its last state is that it was running."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_small(folder, small_data(folder, tiny_base))
    loaded = load_config(config, ["run.epochs=1"])
    remember(loaded)
    context = prepare(loaded)
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    note_state(context, "running")
    mark_finished(context, describe_result(context))
    return context, config
