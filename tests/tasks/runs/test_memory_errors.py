"""Remedies for too little memory: every phase of an estimate has some, and they name settings that exist."""

from __future__ import annotations

import re

import pytest
import torch

from flowmill.configs.errors import OutOfMemoryError
from flowmill.configs.schema import RunConfig
from flowmill.tasks.modalities.diffusion import estimate as denoisers
from flowmill.tasks.modalities.memory import SCORE
from flowmill.tasks.modalities.tokens import estimate as texts
from flowmill.tasks.runs.memory_errors import REMEDIES, enough_memory
from tests.support.settings import section_fields


def test_every_phase_has_a_remedy() -> None:
    assert {*denoisers._PHASES, *texts._PHASES, SCORE} <= set(REMEDIES)


@pytest.mark.parametrize("phase", REMEDIES)
def test_remedies_name_settings(phase: str) -> None:
    known = {re.sub(r"\.\*", "[]", name) for name, _ in section_fields(RunConfig)}
    known |= {name.rpartition(".")[0] for name in known}
    named = set(re.findall(r"(?:model|execution|rollout|critic|rewards)[\w\[\]]*(?:\.[a-z_]+)+", REMEDIES[phase]))
    assert named
    assert named <= known


def test_an_error_names_the_work_and_the_remedy() -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"optimize@1: no room Lower it\. 'flowmill check'"),
        enough_memory("optimize@1", "Lower it."),
    ):
        raise torch.OutOfMemoryError("no room")
