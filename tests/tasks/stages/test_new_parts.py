"""A reward, an algorithm and a family are one class and one line of a table each; a setting is one line of its section.

A new stage is in ``test_new_stage.py``, a new kind of policy in ``tests/tasks/modalities/test_modality.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import PositiveFloat
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import FAMILIES, FamilySpec
from flowmill.models.policies import POLICIES
from flowmill.models.policies.pipeline import Modules, Rows
from flowmill.models.policies.sd3 import SD3
from flowmill.models.rewards import REWARDS
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics.samples import arrays_of
from flowmill.tasks.metrics.view import RunView
from tests.conftest import ROOT
from tests.support.inside import Make, prepare, run_epoch, updates_of


def redness(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(image[..., 0].mean()) for image in media]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Ratio times advantage, without a clip range."""

    scale: PositiveFloat = 1.0

    @property
    def requires(self) -> Requirements:
        return Requirements(min_group_size=2)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        rows = expect(batch, TransitionBatch)
        log_probs = models.step(rows, models.velocity(rows)).log_prob(rows.next_latents)
        ratio = torch.exp(log_probs - rows.old_log_probs)
        return RowLoss(loss=-self.scale * rows.advantages * ratio, metrics={"ratio": ratio.detach()})


class Half(SD3):
    """Stable Diffusion 3 at half the velocity."""

    family = "half"

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        return super().call(modules, latents, sigma, rows) / 2


def test_a_reward_is_one_function_and_one_line(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS, "redness", f"{__name__}:redness")
    config = make_config("rewards=[redness]")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    samples = RunView(context).samples(1)
    images = RunView(context).pictures(1)
    expected = [images[name][..., 0].mean() for name in samples["sample_id"].to_pylist()]
    assert samples["reward.redness"].to_pylist() == pytest.approx(expected)


def test_an_algorithm_is_one_class_and_one_line(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "plain", f"{__name__}:Plain")
    with pytest.raises(ConfigError, match="Did you mean 'scale'"):
        check_config(make_config("optimize.algorithm={name: plain, options: {scal: 2}}"))
    config = make_config("optimize.algorithm={name: plain, options: {scale: 2}}")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert updates[0]["ratio"] == 1.0
    assert updates[-1]["ratio"] != 1.0


def test_a_family_is_one_class_and_one_line(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "half", FamilySpec(f"{__name__}:Half", "StableDiffusion3Pipeline", any_size=True))  # type: ignore[arg-type]
    monkeypatch.setitem(POLICIES, "half", f"{__name__}:Half")
    moved = {}
    for family in ("sd3", "half"):
        config = make_config(f"model.policy={family}", f"run.name={family}", "rollout.sampler={name: cps}")
        check_config(config)
        context = prepare(config)
        run_epoch(context, 1)
        latents = arrays_of(context.store, context.chain.require(1, "rollout").ref, "latents", None)
        moved[family] = [np.abs(states[1] - states[0]).mean() for _, states in sorted(latents.items())]
        assert updates_of(context, 1)
    assert len(moved["half"]) == len(moved["sd3"])
    assert moved["half"] != moved["sd3"]


#: What follows from one line of ``configs/optimizer.py``, in a process that has it.
FOLLOWS = """
import flowmill
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from pages import config_page
before, after = load_config("digits", ["optimize.ema={}"]), load_config("digits", ["optimize.ema.pause=3"])
assert after.optimize.ema.pause == 3
assert "pause" not in before.optimize.fingerprinted()["ema"], "runs from before keep their names"
assert after.optimize.fingerprinted()["ema"]["pause"] == 3
assert flowmill.Optimize(ema={"pause": 3}).ema.pause == 3
rows = [*config_page._rows("optimize.ema", type(after.optimize.ema))]
assert "| `optimize.ema.pause` | integer, >= 0 | `0` | Updates before the first. |" in rows
try:
    load_config("digits", ["optimize.ema.pausse=3"])
except ConfigError as error:
    assert "Did you mean 'pause'" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_a_setting_is_one_line_of_its_section(tmp_path: Path) -> None:
    package = tmp_path / "flowmill"
    shutil.copytree(ROOT / "flowmill", package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for link in [each for each in package.iterdir() if each.is_symlink()]:
        link.unlink()
        link.symlink_to(ROOT / link.name)
    (package / "configs").unlink()
    shutil.copytree(ROOT / "configs", package / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    section = package / "configs" / "optimizer.py"
    line = '    pause: Annotated[int, Later()] = Field(0, ge=0)\n    """Updates before the first."""\n'
    text = section.read_text().replace("    every: int =", f"{line}    every: int =")
    text = text.replace("import Literal", "import Annotated, Literal").replace(
        "import Section", "import Later, Section"
    )
    section.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
