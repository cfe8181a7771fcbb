"""How a run stands, as it was written down by who executed it."""

from __future__ import annotations

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.tasks.runs.addresses import find_artifact
from flowmill.tasks.runs.locks import executing, holding
from flowmill.tasks.runs.state import note_state, state_of
from tests.support.inside import Make, prepare, run_epoch


def test_running_stopped_failed_and_done(make_config: Make) -> None:
    context = prepare(make_config())
    note_state(context, "running")
    with executing(context):
        assert state_of(context, complete=False) == "running"
    with holding(context.store, context.run.name):
        note_state(context, "done")
        assert state_of(context, complete=True) == "running", "a process loads its libraries to go on"
    note_state(context, "running")
    assert state_of(context, complete=False) == "stopped", "killed"
    note_state(context, "failed", ValueError("no reward\nmore"))
    assert state_of(context, complete=False) == "failed: no reward"
    assert state_of(context, complete=True) == "done"
    remedy = f"'/{'folder/' * 20}image.png' cannot be read. Save it again, or remove its prompts."
    note_state(context, "failed", ValueError(remedy))
    assert state_of(context, complete=False) == f"failed: {remedy}", "messages end with the remedy"


def test_an_artifact_has_an_address_in_its_run(make_config: Make) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    ref = context.chain.require(1, "score", "jpeg_compressibility").ref
    for name in ("small/score@1", "small/score[jpeg_compressibility]@1", str(ref), ref.id[:9]):
        assert find_artifact(context.store, name) == ref
    assert find_artifact(context.store, "small/policy@0") == context.policy_ref(0)
    with pytest.raises(ConfigError, match=r"stage 'scores' does not exist\. Did you mean 'score'"):
        find_artifact(context.store, "small/scores@1")
