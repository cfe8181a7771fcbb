"""Policies, algorithms and samplers that end the process: one message with the stage and the line."""

from __future__ import annotations

import sys

import pytest

from flowmill.configs.errors import FlowmillError
from tests.conftest import ConfigFactory
from tests.support.inside import prepare, run_epoch
from tests.tasks.choices.test_samplers import SAMPLER


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("flowmill.models.policies.sd3:SD3.call", "rollout"),
        ("flowmill.tasks.algorithms.grpo:GRPO.loss", "optimize"),
        ("flowmill.tasks.choices.difficulty:Difficulty.pick", "choose"),
    ],
)
def test_code_of_a_stage_that_ends_the_process_is_named(
    place: str, stage: str, make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = prepare(make_config(*([SAMPLER] if stage == "choose" else [])))
    monkeypatch.setattr(place.replace(":", "."), lambda *given, **named: sys.exit(3))
    with pytest.raises(FlowmillError, match=rf"{stage}.*: '{__file__}', line \d+, raised SystemExit: 3"):
        run_epoch(context, 1)
