"""Every option of every scheduler class that a family follows: the pipeline's own samples, or a refusal by name.

The options are those of the classes' own signatures, so that one which diffusers adds fails here until it has values.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import build, resolve
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.preserving import flow_length
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies import POLICIES
from flowmill.models.policies.ddim import DDIMOptions, DDIMPolicy, UNetPolicy
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.policies.modular import ModularPolicy
from flowmill.models.policies.nan_checks import levels_in_words
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.pipeline_index import component_entry, index_file
from flowmill.models.quickstart.tiny import build_tiny
from tests.contracts.test_policies import (
    TINY,
    conditioning,
    drawn_alone,
    filled,
    no_noise,
    pictures,
    plain_pipeline,
    seen,
    set_scheduler,
    small_references,  # noqa: F401 - a fixture
    starting,
)
from tests.support.families import PIPELINES, UNPADDED

STEPS = 4
#: Values of each option that no tiny pipeline has, so that each changes something, or would.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "num_train_timesteps": (500,),
    "beta_start": (0.002,),
    "beta_end": (0.02,),
    "beta_schedule": ("linear", "squaredcos_cap_v2", "sigmoid"),
    "trained_betas": (np.linspace(0.001, 0.01, 1000).tolist(),),
    "clip_sample": (True,),
    "clip_sample_range": (2.0,),
    "set_alpha_to_one": (True,),
    "steps_offset": (0, 3),
    "prediction_type": ("v_prediction", "sample", "flow_prediction"),
    "thresholding": (True,),
    "dynamic_thresholding_ratio": (0.9,),
    "sample_max_value": (2.0,),
    "timestep_spacing": ("trailing", "linspace"),
    "rescale_betas_zero_snr": (True,),
    "skip_prk_steps": (False, True),
    "interpolation_type": ("log_linear",),
    "use_karras_sigmas": (True,),
    "use_exponential_sigmas": (True,),
    "use_beta_sigmas": (True,),
    "sigma_min": (0.1,),
    "sigma_max": (5.0,),
    "timestep_type": ("continuous",),
    "final_sigmas_type": ("sigma_min",),
    "solver_order": (3,),
    "solver_type": ("heun", "bh1"),
    "solver_p": (None,),
    "predict_x0": (False,),
    "disable_corrector": ([0],),
    "algorithm_type": ("dpmsolver", "sde-dpmsolver++"),
    "lower_order_final": (False,),
    "euler_at_final": (True,),
    "use_lu_lambdas": (True,),
    "use_flow_sigmas": (True, False),
    "flow_shift": (5.0,),
    "snr_shift_scale": (2.0,),
    "lambda_min_clipped": (-5.0,),
    "variance_type": ("learned",),
    "use_dynamic_shifting": (True, False),
    "time_shift_type": ("linear",),
    "shift": (2.0,),
    "base_shift": (0.4,),
    "max_shift": (1.3,),
    "base_image_seq_len": (128,),
    "max_image_seq_len": (2048,),
    "invert_sigmas": (True,),
    "shift_terminal": (0.1,),
    "stochastic_sampling": (True,),
}
#: What a class is saved with where its own default is refused, so that the other options are looked at.
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "EulerDiscreteScheduler": {"timestep_spacing": "leading"},
    "DPMSolverMultistepScheduler": {"timestep_spacing": "leading"},
    "DDIMScheduler": {"clip_sample": False},
}
#: Options that have a meaning only together with others.
COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "rescale_betas_zero_snr": {"prediction_type": "v_prediction", "timestep_spacing": "trailing"},
    "clip_sample_range": {"clip_sample": True},
}
SCHEDULERS = [(family, name) for family in PIPELINES for name in resolve(POLICIES, family, label="policy").schedulers]
DDIM = [name for name in PIPELINES if issubclass(resolve(POLICIES, name, label="policy"), DDIMPolicy)]
UNETS = [name for name in DDIM if issubclass(resolve(POLICIES, name, label="policy"), UNetPolicy)]
#: Of the others each is followed as one of these.
OFTEN = {"sd15", "sdxl", "sd3", "flux1", "qwen_image", "wan21"}


def changes(family: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield what is changed of a scheduler's config, one option after the other."""
    options = list(inspect.signature(getattr(diffusers, name).__init__).parameters)[1:]
    assert set(options) <= set(VALUES), "diffusers has an option that this table has no value of"
    for option in options:
        companions = {key: value for key, value in COMPANIONS.get(option, {}).items() if not name.startswith("UniPC")}
        yield from ({**companions, option: value} for value in VALUES[option])


class Folder:
    """A tiny pipeline's folder with one scheduler after another."""

    def __init__(self, family: str, name: str, path: Path) -> None:
        quiet_libraries()
        self.family, self.path, self.tiny = family, path, TINY[family]
        self.policy: type[PipelinePolicy] = resolve(POLICIES, family, label="policy")
        build_tiny(family).save_pretrained(path)
        loaded = plain_pipeline(self.policy, path)
        self.parts = {key: part for key, part in loaded.components.items() if key != "scheduler" and part is not None}
        index = index_file(path)
        entry = component_entry(index.name, "scheduler", "diffusers", name)
        index.write_text(json.dumps({**json.loads(index.read_text()), "scheduler": entry}))
        # That of modular pipelines is their blocks', until a folder has one.
        (path / "scheduler").mkdir(exist_ok=True)
        shift = {"shift": 3.0} if self.tiny.frames > 1 and name.startswith("Flow") else {}
        own = {} if shift else loaded.scheduler.config
        config = getattr(diffusers, name).from_config(own, **shift).config
        # Not what says which values are defaults, and are to be taken from another class again: no file has that.
        self.base = {key: value for key, value in config.items() if not key.startswith("_")} | PLAIN.get(name, {})
        size = {"height": self.tiny.size, "width": self.tiny.size, "frames": self.tiny.frames}
        self.settings = DiffusionSettings(**size)
        self.options = build(self.policy.options_type, family, self.tiny.options, label="options of")

    def write(self, change: Mapping[str, Any]) -> None:
        (self.path / "scheduler" / "scheduler_config.json").write_text(json.dumps({**self.base, **change}))

    def refusal(self) -> str | None:
        try:
            self.policy.check_folder(self.path, self.settings)
            self.policy.check_options(self.path, self.options)
        except ConfigError as error:
            return str(error)
        return None

    def pipeline(self) -> Any:
        if issubclass(self.policy, ModularPolicy):
            return filled(self.policy.pipeline_blocks().init_pipeline(str(self.path)), self.parts)
        return getattr(diffusers, self.policy.pipeline_name).from_pretrained(self.path, **self.parts)

    def ours(self) -> tuple[DiffusionPolicy, torch.Tensor]:
        policy = self.policy(self.pipeline(), self.settings, self.options)
        start, sigmas = policy.initial_latents([torch.Generator().manual_seed(7)]), policy.sigmas(STEPS)
        sampler = Sampler(kernel=ODE(), solver=Euler())
        cond, plans = conditioning(policy, self.settings.guidance_scale > 1, ["a red cube"]), [ode_plan()]
        start = policy.started(start, sigmas, cond)
        final = sample(policy, cond, start, sigmas, sampler=sampler, plans=plans, noise=no_noise).final
        return policy, policy.finished(final, cond)

    def theirs(self, policy: DiffusionPolicy, output: str) -> Any:
        pipeline, call = self.pipeline(), policy.pipeline_call(STEPS, None)
        pipeline.set_progress_bar_config(disable=True)
        set_scheduler(pipeline, call)
        given = {**self.tiny.call, **call.arguments, "output_type": output}
        starts = pictures(self.family, 1)
        if policy.starts_from_clips:
            given |= starting(policy, starts, STEPS)
        elif starts is not None:
            (images,) = starts
            given["image"] = Image.fromarray(images[0])
        given |= {"prompt": ["a red cube"], "generator": [torch.Generator().manual_seed(7)]}
        if self.family in UNPADDED:
            return drawn_alone(pipeline, **given)
        result = pipeline(**given)
        return result.frames if self.tiny.frames > 1 else result.images

    def check(self) -> None:
        """Check that the ODE is the pipeline's own call, set up as the policy says."""
        policy, final = self.ours()
        if self.family == "flux2_klein":
            # Its pipeline gives unpacked latents; equal pictures of equal decoders say the same.
            images = (np.asarray(self.theirs(policy, "np")) * 255).round()
            np.testing.assert_array_equal(policy.decode(final).numpy(), images)
            return
        if isinstance(policy, DDIMPolicy):
            final = final / flow_length(policy.sigmas(STEPS)[-1:])
        final = seen(policy, final)
        theirs = self.theirs(policy, "latent")
        assert torch.isfinite(theirs).all()
        torch.testing.assert_close(final, theirs, rtol=1e-5, atol=max(1e-5, 1e-5 * float(theirs.abs().max())))


def marked(family: str, name: str) -> Any:
    return pytest.param(family, name, marks=[] if family in OFTEN else [pytest.mark.campaign])


@pytest.mark.campaign_cases(
    "sdxl-DDIMScheduler", "sdxl-DPMSolverMultistepScheduler", "sdxl-EulerDiscreteScheduler", "sdxl-PNDMScheduler"
)
@pytest.mark.usefixtures("small_references")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("family", "name"), [marked(*each) for each in SCHEDULERS])
def test_every_option_is_the_pipelines_or_refused_by_name(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pipeline scales the image to edit to a megapixel; here both take it as small as it is.
    edit = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions"
    monkeypatch.setattr(edit, lambda area, ratio: (64, 64, None))
    folder, wrong, followed = Folder(family, name, tmp_path), {}, set()
    for change in changes(family, name):
        folder.write(change)
        *_, option = change
        refusal = folder.refusal()
        if refusal is not None:
            if not any(isinstance(each, str) and each in refusal for each in (*change, change[option])):
                wrong[f"{change}"] = f"refused for another reason: {refusal}"
            continue
        followed.add(option)
        try:
            folder.check()
        except AssertionError as error:
            wrong[f"{change}"] = f"followed as something else: {error}"
    assert not wrong, wrong
    assert followed


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
@pytest.mark.parametrize("family", DDIM)
def test_a_schedule_that_ends_in_pure_noise(family: str, prediction: str, tmp_path: Path) -> None:
    folder = Folder(family, resolve(POLICIES, family, label="policy").walked, tmp_path)
    folder.write({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": prediction})
    assert folder.refusal() is None
    policy, _ = folder.ours()
    assert policy.sigmas(STEPS)[0] == 1
    folder.check()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("family", UNETS)
def test_guidance_is_rescaled_as_the_pipeline_does(family: str, prediction: str, tmp_path: Path) -> None:
    folder, found = Folder(family, "DDIMScheduler", tmp_path), []
    folder.write({"prediction_type": prediction})
    folder.settings = dataclasses.replace(folder.settings, guidance_scale=7.5)
    for rescale in (0.0, 0.7):
        folder.options = dataclasses.replace(folder.options, guidance_rescale=rescale)
        folder.check()
        found.append(folder.ours()[1])
    assert not torch.allclose(*found, rtol=1e-2)


def test_a_prediction_that_says_nothing_of_pure_noise_is_refused(tmp_path: Path) -> None:
    folder = Folder("sd15", "DDIMScheduler", tmp_path)
    folder.write({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"})
    assert "samples would be NaN. Set prediction_type" in str(folder.refusal())


@pytest.mark.parametrize(
    ("change", "steps", "expected"),
    [
        ({"timestep_spacing": "trailing"}, 7, "only where 1000 is a multiple of their number"),
        ({}, 1001, "knows 1000 noise levels, and its steps would leave them"),
        ({}, 1001, "(num_train_timesteps 1000, steps_offset 1)"),
        ({"trained_betas": [0.001, 0.01, 0.02]}, 4, "knows 3 noise levels"),
        ({"beta_end": "much"}, 4, "diffusers can make no DDIMScheduler of scheduler/scheduler_config.json"),
    ],
)
def test_steps_that_a_schedule_does_not_have_are_refused(
    change: Mapping[str, Any], steps: int, expected: str, tmp_path: Path
) -> None:
    folder = Folder("sd15", "DDIMScheduler", tmp_path)
    folder.options = DDIMOptions(steps=steps)
    folder.write(change)
    assert expected in str(folder.refusal())


def test_messages_name_a_few_of_many_noise_levels() -> None:
    assert levels_in_words(torch.linspace(1, 0, 1001)) == "1, 0.999, 0.998, ..., 0.001, 0"
    assert levels_in_words(torch.tensor([1.0, 0.5])) == "1, 0.5"


@pytest.mark.parametrize("family", DDIM)
def test_a_chain_may_visit_every_timestep_of_training(family: str, tmp_path: Path) -> None:
    folder = Folder(family, resolve(POLICIES, family, label="policy").walked, tmp_path)
    folder.write({})
    levels = folder.policy.trained_levels(tmp_path)
    assert len(levels) == 1000
    assert bool((levels[1:] > levels[:-1]).all())
    policy = folder.policy(folder.pipeline(), folder.settings, folder.options)
    torch.testing.assert_close(policy.sigmas(1000)[:-1], levels.flip(0).float(), rtol=0, atol=0)
    call = policy.pipeline_call(1000, None)
    assert call is not None
    assert call.scheduler is not None
    plain = getattr(diffusers, call.scheduler.name).from_config(
        policy.pipeline.scheduler.config, **call.scheduler.options
    )
    plain.set_timesteps(1000)
    assert plain.timesteps.tolist() == list(range(999, -1, -1))


def test_a_unet_that_takes_guidance_is_refused(tmp_path: Path) -> None:
    folder = Folder("sd15", "DDIMScheduler", tmp_path)
    path = tmp_path / "unet" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_cond_proj_dim": 256}))
    assert "(time_cond_proj_dim), as distilled models do" in str(folder.refusal())
