from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError, PromptError
from configs.load import load_config
from configs.schema import RunConfig
from tasks.check import check_config
from tests.conftest import ROOT

Make = Callable[..., RunConfig]


def test_cost_by_hand(make_config: Make) -> None:
    cost = check_config(make_config())
    # 4 groups of 4, 3 steps, 2 of them trained, 3 states of 4 x 8 x 16 float32 values.
    assert cost.samples_per_epoch == 16
    assert cost.rollout_forwards == 16 * 3
    assert cost.optimize_rows == 16 * 2
    assert cost.latent_bytes_per_epoch == 16 * 3 * (4 * 8 * 16) * 4
    assert cost.updates == 2 * 2
    assert cost.shards_per_epoch == 2
    assert cost.evaluate_forwards == 2 * 4 * 3
    assert cost.evaluations == 3
    assert cost.prompts == {"train": 8, "heldout": 3, "negative": 0}


def test_guidance_doubles_the_rows_and_needs_the_negative_prompt(make_config: Make) -> None:
    cost = check_config(make_config("model.guidance_scale=4.5"))
    assert cost.rollout_forwards == 2 * 16 * 3
    assert cost.prompts["negative"] == 1


def test_heldout_prompts_must_not_be_trained_on(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "heldout.txt").write_text('"91"\n"03"\n')
    with pytest.raises(PromptError, match=r"1 prompts are in prompts\.train too, the first is '\"03\"'"):
        check_config(make_config())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.sampler.name=ode", "needs log-probs of stochastic steps, but rollout.sampler is 'ode'"),
        ("rollout.group_size=1", "rollout.group_size is 1, but optimize.algorithm 'grpo' compares samples"),
        ("rollout.steps=1", "trains none. Raise rollout.steps"),
        ("rollout.prompts_per_epoch=9", "prompts.train holds 8 prompts"),
        ("model.policy=sd4", "model.policy 'sd4' does not exist. Did you mean 'sd3'"),
        ("rewards.0.name=jpeg_compresibility", "Did you mean 'jpeg_compressibility'"),
        ("optimize.algorithm.name=gpro", "Did you mean 'grpo'"),
        ("rollout.sampler.name=flow_sd", "Did you mean 'flow_sde'"),
        ("rollout.store=webdatset", "Did you mean 'webdataset'"),
        ("optimize.algorithm={name: nft}", "needs the final latents of a rollout, but rollout.plan 'all'"),
        ("rollout.plan={name: final}", "trains none"),
        ("rollout.solver=dpm2", "remembers earlier steps"),
        ("rollout.plan={name: window, options: {size: 5}}", "does not fit into"),
        ("evaluate.solver=dpm3", "Did you mean 'dpm2'"),
        ("rollout.plan.options.last=never", "must be 'ode', 'sde' or 'train'"),
        ("rollout.sampler.options.noise=1", "has no option 'noise'. Did you mean 'noise_level'"),
        ("optimize.algorithm.options.clip_range=0", "must lie between 0 and 1"),
        ("optimize.algorithm.options.kl=gauss", "must be 'gaussian'"),
        ("evaluate.judges=[{name: jpeg_compressibility}]", "appears 2 times. Give each its own 'label'"),
        ("rewards.0.name=nowhere:Reward", "module 'nowhere' cannot be imported"),
        ("rewards.0.name=math:pi", "has no method 'score"),
        ("model.path=./nowhere", "is no folder"),
    ],
)
def test_what_cannot_work_is_refused(make_config: Make, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(make_config(override))
    assert expected in str(error.value)


def test_images_are_asked_for_and_refused_by_family() -> None:
    kontext = ROOT / "configs" / "tiny_flux1_kontext.yaml"
    check_config(load_config(kontext))
    with pytest.raises(ConfigError, match=r"'flux1_kontext' starts from images, but prompts\.image is not set"):
        check_config(load_config(kontext, ["prompts.image=null"]))
    with pytest.raises(ConfigError, match=r"prompts\.image is 'image', but model\.policy 'flux1' takes no image"):
        check_config(load_config(kontext, ["model.policy=flux1"]))
