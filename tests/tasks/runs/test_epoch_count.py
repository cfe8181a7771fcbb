"""A run never loses epochs because a config asks for fewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowmill.configs.errors import RunConflictError
from flowmill.flows.cli.command_resolution import understood
from flowmill.flows.requests import ContinueRequest, PipelineRequest, StageRequest
from flowmill.run_starter import start
from flowmill.tasks.checks.stage_forecast import forecast
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.epoch_count import kept_length, length, length_note
from flowmill.tasks.runs.extension import advanced, extend, grown
from flowmill.tasks.runs.opening import begin_run, bind_run, find_run, finished_result, mark_finished
from flowmill.tasks.runs.state import note_state
from flowmill.tasks.specs.graph import Node
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage


def test_what_was_trained_or_asked_for_is_kept(make_config: Make) -> None:
    one = make_config("run.epochs=1")
    assert kept_length(one) is one, "there is no run yet"
    context = prepare(make_config("run.epochs=3"))
    assert kept_length(one) is one, "nothing is trained"
    for epoch in (1, 2):
        run_epoch(context, epoch)
    assert length(context.run) == 2
    kept = kept_length(one)
    assert kept.run.epochs == 2
    note = length_note(one, kept)
    assert note is not None
    assert "has 2 epochs and the config asks for 1" in note
    assert "--rewind" in note
    longer = make_config("run.epochs=5")
    assert kept_length(longer) is longer
    # As --advance does: four more than it has, of which none is trained yet.
    grown(context, 4)
    assert kept_length(one).run.epochs == 6
    assert kept_length(one, rewind=True) is one
    # Once rewound it stays so, though later epochs are still there.
    begin_run(one)
    assert kept_length(one) is one
    assert kept_length(make_config("run.epochs=0")).run.epochs == 1


def test_every_way_to_start_a_run_keeps_its_length(
    make_config: Make, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowmill.flows import process_state

    monkeypatch.delenv("FLOWMILL_ROOT", raising=False)
    context = prepare(make_config("run.epochs=2"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    fewer = ["run.epochs=1"]
    asked = PipelineRequest(config=str(config_file), overrides=fewer)
    assert process_state.configured(asked).run.epochs == 2
    assert understood(asked).config.run.epochs == 2
    assert start(config_file, overrides=fewer).config.run.epochs == 2
    rewound = asked.model_copy(update={"rewind": True})
    assert process_state.configured(rewound).run.epochs == understood(rewound).config.run.epochs == 1
    more = understood(asked.model_copy(update={"advance": 2}))
    assert (more.config.run.epochs, more.note) == (4, None)
    # What the flow is asked gives the same.
    assert process_state.configured(more.request).run.epochs == 4


def test_what_starts_or_extends_a_run_leaves_one_alone_that_is_executed(
    make_config: Make, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config and length are those of the process that executes it; one that waits goes by the run of then."""
    from flowmill.flows import pipeline, process_state, scheduled_runs, stages

    monkeypatch.delenv("FLOWMILL_ROOT", raising=False)
    context = prepare(make_config("run.epochs=4"))
    run_epoch(context, 1)
    (root, name), fewer = (context.store.root.uri, context.run.name), ["run.epochs=1"]
    asked = PipelineRequest(config=str(config_file), overrides=fewer)
    ways = {
        "begin": lambda: begin_run(make_config(*fewer)),
        "start": lambda: start(config_file, overrides=fewer),
        "rewound start": lambda: start(config_file, overrides=fewer, rewind=True),
        "extend": lambda: extend(context, 9),
        "grow": lambda: grown(context, 1),
        "run": lambda: pipeline.pipeline.fn(asked),
        "rewind": lambda: pipeline.pipeline.fn(asked.model_copy(update={"rewind": True})),
        "advance": lambda: pipeline.pipeline.fn(asked.model_copy(update={"advance": 1})),
        "continue": lambda: pipeline.bring_up_to_date.fn(ContinueRequest(run=name, root=root, advance=1)),
        "stage": lambda: stages.FLOWS["rollout"].fn(StageRequest(run=name, root=root, epoch="next")),
    }

    def records() -> dict[str, bytes]:
        files = [each for each in Path(root, "runs").rglob("*.json") if each.is_file()]
        return {str(each): each.read_bytes() for each in files}

    before = records()
    assert before
    silent: Any = SimpleNamespace(message=lambda text: None, progress=lambda *args: None)
    with process_state.shown_by(silent):
        with context.store.root.lock(context.run.lock_path, f"Run '{name}'"):
            for way, start_of in ways.items():
                with pytest.raises(RunConflictError, match="is being executed by another process"):
                    start_of()
                assert records() == before, way
            assert bind_run(make_config(*fewer)).config.run.epochs == 1
            assert records() == before, "a sweep reads the runs of its variants"
        # The other process trains an epoch in the meantime.
        monkeypatch.setattr(scheduled_runs, "_await_turn", lambda *args: run_epoch(context, 2))
        begun: list[int] = []

        @contextmanager
        def training_run(run: RunContext, request: PipelineRequest) -> Iterator[tuple[Any, None]]:
            begun.append(run.config.run.epochs)
            yield SimpleNamespace(context=run), None

        monkeypatch.setattr(pipeline, "training_run", training_run)
        monkeypatch.setattr(pipeline, "train", lambda session, callbacks: None)
        pipeline.pipeline.fn(asked)
    assert begun == [2]


def test_dry_says_what_run_would_do(make_config: Make, config_file: Path) -> None:
    context = prepare(make_config("run.epochs=1"))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    asked = understood(PipelineRequest(config=str(config_file), overrides=["run.epochs=0"]))
    assert asked.note is not None
    # Nothing is marked as finished, but all is there.
    assert not any(stage.due for stage in forecast(asked.config, asked.run))
    mark_finished(context, {})
    assert asked.run is not None
    assert finished_result(asked.run) == {}
    made = forecast(asked.config, asked.run)
    assert not any(stage.due for stage in made)
    counts = {stage.stage: stage.fresh for stage in made}
    assert counts == {stage.stage: stage.fresh for stage in forecast(asked.config)}
    other = understood(PipelineRequest(config=str(config_file), overrides=["run.epochs=0", "run.seed=9"]))
    assert (other.run, other.config.run.epochs) == (None, 0)
    assert other.conflicts == ("run.seed: 0 -> 9",)
    assert find_run(make_config("run.epochs=1")) is not None
    assert Node(1, "export") in list(context.chain.nodes())


def test_a_stopped_request_for_further_epochs_leads_to_the_same_number(make_config: Make, config_file: Path) -> None:
    """However often it is stopped, by the command and by a schedule; once it is done, it is another request."""
    context = prepare(make_config("run.epochs=1"))
    run_epoch(context, 1)
    note_state(context, "done")
    asked = PipelineRequest(config=str(config_file), advance=2)
    longer = grown(context, 2)
    for state, trained in (("running", 1), ("stopped", 2), ("failed", 2)):
        note_state(longer, state)
        again = understood(asked)
        assert again.config.run.epochs == advanced(context, 2) == grown(context, 2).config.run.epochs == 3, state
        assert ("has 2 epochs: this goes on" in str(again.note)) == (trained == 2)
        assert advanced(context, 1) == trained + 1, "another request"
        if trained == 1:
            run_epoch(longer, 2)
    assert understood(asked.model_copy(update={"advance": None})).config.run.epochs == 3, "nor does it end earlier"
    run_epoch(longer, 3)
    assert advanced(longer, 2) == 3, "the evaluation and the export are missing"
    for node in longer.chain.nodes():
        if longer.chain.find(*node) is None:
            run_stage(longer, node.stage, node.epoch, node.slot)
    assert advanced(longer, 2) == 5, "all is there, though nothing recorded the end"
    note_state(longer, "done")
    assert (advanced(longer, 2), understood(asked).note) == (5, None)
    begin_run(make_config("run.epochs=2"))
    note_state(longer, "stopped")
    assert advanced(longer, 2) == 4, "a run that ends earlier since has no request to go on with"
