"""Actions on alerts: an alert is announced once, may stop a run, and takes no run back."""

from __future__ import annotations

from typing import Any

import pytest

from flowmill.configs.errors import StoppedError
from flowmill.flows import artifacts
from flowmill.flows.callbacks import RunCallbacks
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics.alerts import Alert
from flowmill.tasks.runs.staleness import side_results
from flowmill.tasks.runs.state import note_state, state_of
from tests.support.inside import Make, prepare


def test_an_event_that_is_announced_again_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect stores an event of a known id once; the same run of another store has events of its own."""
    ids: list[Any] = []
    monkeypatch.setattr(artifacts, "has_lasting_api", lambda: True)
    monkeypatch.setattr(artifacts, "emit_event", lambda event, **facts: ids.append(facts["id"]))
    for store, epoch in (("a", 1), ("a", 1), ("a", 2), ("b", 1)):
        artifacts.announce("alert", "small", once=store, epoch=epoch)
    artifacts.announce("exported", "small", epoch=1)
    assert ids[0] == ids[1]
    assert len(set(ids[:4])) == 3
    assert ids[4] is None


class _Tracker:
    tagged = 0

    def log_alerts(self) -> None:
        self.tagged += 1


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_an_alert_may_stop_a_run(make_config: Make, action: str) -> None:
    context = prepare(make_config(f"watch.on.kl={action}"))
    callbacks: Any = object.__new__(RunCallbacks)
    callbacks._context, callbacks._run, callbacks._tracker = context, "small", _Tracker()
    alerts = [Alert(rule="entropy", epoch=1, text="low"), Alert(rule="kl", epoch=1, text="epoch 1: far.")]
    if action == "warn":
        callbacks._warn(alerts)
    else:
        with pytest.raises(
            StoppedError, match=r"as watch.on.kl says: epoch 1: far\. .* set watch.on.kl to 'warn'\.$"
        ) as error:
            callbacks._warn(alerts)
        note_state(context, "held", error.value)
        assert state_of(context, complete=False).startswith("stopped: Run 'small' ends here, as watch.on.kl says")
    assert callbacks._tracker.tagged == 1


def test_a_rule_may_act_with_and_without_a_figure(make_config: Make) -> None:
    check_config(make_config("watch.on={monitor: stop, heldout: stop}", "prompts.heldout=null"))
    check_config(make_config("watch.on={monitor: stop, heldout: stop}", "monitors=[jpeg_incompressibility]"))


def test_decisions_of_earlier_versions_are_side_results(make_config: Make) -> None:
    context = prepare(make_config("watch={on: {kl: warn}, rate: 0.1}"))
    made = context.chain.require(0, "preprocess")
    context.run.append(LineageEntry(epoch=1, stage="steer", slot="", artifact=made.artifact, forced=False))
    assert [side.label for side in side_results(context.chain)] == ["stage 'steer' no longer exists"]
