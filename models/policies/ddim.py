"""Base classes of families sampled with DDIM: a variance-preserving training schedule, expressed as a flow.

The coordinates are those of ``flowmill.models.maths.preserving``; the scheduler's config gives the prediction type.
UNet families also share a base class: they make images, and the number of steps is an option.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import Share
from flowmill.models.devices import moved, wide_dtype
from flowmill.models.library_loading import diffusers_class, read_json
from flowmill.models.maths.guidance import rescaled_guided
from flowmill.models.maths.preserving import PREDICTIONS, Preserving, clean_ends, flow_length, flow_sigma
from flowmill.models.policies.diffusion import DiffusionSettings, PipelineCall, SchedulerChoice
from flowmill.models.policies.pipeline import Modules, PipelinePolicy, Rows
from flowmill.models.policies.pipeline_configs import DISCRETE, Fields, read_index, scheduler_of, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DDIMOptions:
    """Options of the family."""

    steps: PositiveInt = 50
    """Denoising steps, equal to those of the rollout and the evaluation: they determine the first noise level."""
    guidance_rescale: Share = 0.0
    """How far guided predictions are rescaled to the std of conditional ones, 0 to 1 (arXiv 2305.08891: 0.7)."""


class DDIMPolicy(PipelinePolicy):
    """Adapter for pipelines with a variance-preserving schedule, with any scheduler of that schedule in the folder."""

    joint_guidance = True
    walked: ClassVar[str] = "DDIMScheduler"
    """The scheduler class that sets the steps of a chain, created from the config of the folder's scheduler."""
    # DDIM clips by default if another scheduler's config has no such field.
    walked_options: ClassVar[Mapping[str, Any]] = {"clip_sample": False}

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        super().__init__(pipeline, settings, options)
        pipeline.scheduler = self._walking(pipeline.scheduler)

    @classmethod
    def noise_range(cls, folder: Path, steps: int) -> tuple[float, float]:
        """Return the first and last noise level of ``steps`` steps with a folder's scheduler; raise ConfigError if the
        scheduler does not allow this number of steps."""
        index = read_index(folder, cls.pipeline_name, cls.family)
        levels = _levels(cls._walking(scheduler_of(folder, index)), steps)
        return float(levels[0]), float(levels[-1])

    @classmethod
    def trained_levels(cls, folder: Path) -> Tensor:
        """Return the (N,) float64 noise levels of the timesteps that a folder's model was trained with, 0 first."""
        index = read_index(folder, cls.pipeline_name, cls.family)
        return flow_sigma(cls._walking(scheduler_of(folder, index)).alphas_cumprod)

    @classmethod
    def _walking(cls, scheduler: Any) -> Any:
        return diffusers_class(cls.walked).from_config(scheduler.config, **cls.walked_options)

    def sigmas(self, steps: int) -> Tensor:
        """Return b / (a + b) at the scheduler's timesteps, and after its last step; raise ConfigError if the steps do
        not lead from one scheduler timestep to another."""
        return moved(_levels(self.pipeline.scheduler, steps).float(), self.settings.device)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the denoiser at the timestep of each sigma; return eps - x0."""
        timestep, at = self._seen(latents, sigma)
        predicted = self.predicted(modules, at.noisy.to(latents.dtype), timestep, rows)
        return PREDICTIONS[self.pipeline.scheduler.config.prediction_type].velocity(predicted, at)

    @abstractmethod
    def predicted(self, modules: Modules, noisy: Tensor, timestep: Tensor, rows: Rows) -> Tensor:
        """Return the denoiser's prediction for (B, ...) noisy latents a x0 + b eps at (B,) timesteps."""

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        call = super().pipeline_call(steps, negative_prompt)
        options = {**self.walked_options, **_without_offset(self.pipeline.scheduler, steps)}
        return replace(call, scheduler=SchedulerChoice(name=self.walked, options=options, from_config=True))

    def _seen(self, latents: Tensor, sigma: Tensor) -> tuple[Tensor, Preserving]:
        """Return the (B,) timesteps of sigmas, and the latents in variance-preserving coordinates."""
        levels = self.table(sigma.device, self._trained_levels, wide_dtype(sigma.device))
        timestep = (levels[None, :] - sigma[:, None]).abs().argmin(1)
        return timestep, Preserving.of(latents, self.table(sigma.device, self._alphas)[timestep])

    def _alphas(self) -> Tensor:
        """Return alpha_bar of every timestep, in float32; some schedulers compute it in float64."""
        alphas: Tensor = self.pipeline.scheduler.alphas_cumprod
        return alphas.float()

    def _trained_levels(self, dtype: torch.dtype) -> Tensor:
        return flow_sigma(self.pipeline.scheduler.alphas_cumprod).to(dtype)


class UNetPolicy(DDIMPolicy):
    """Adapter for pipelines of a UNet; latents are (B, C, h, w)."""

    options_type = DDIMOptions
    options: DDIMOptions
    denoiser_names = ("unet",)
    # They share one training schedule, which DDIM follows.
    schedulers: ClassVar[Mapping[str, Fields]] = DISCRETE
    size_unit = 8
    blocks = ("down_blocks", "mid_block", "up_blocks")
    # DDPO's targets: the attention projections.
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check that the UNet's prediction is defined at the first noise level, and that guidance is not its input."""
        index = super().check_folder(folder, settings)
        with whole(folder):
            unet = read_json(folder / "unet" / "config.json")
        config = scheduler_of(folder, index).config
        if config.get("rescale_betas_zero_snr") and config.prediction_type == "epsilon":
            raise ConfigError(
                f"model.path '{folder}': its scheduler has rescale_betas_zero_snr with prediction_type 'epsilon'. Its "
                "first latents are pure noise, from which a prediction of the noise gives no image: samples would be "
                "NaN. Set prediction_type in scheduler/scheduler_config.json to the one the model was trained for, "
                "which is 'v_prediction' for published ones, or rescale_betas_zero_snr to false."
            )
        if unet.get("time_cond_proj_dim") is not None:
            raise ConfigError(
                f"model.path '{folder}': its UNet takes guidance as an input (time_cond_proj_dim), as distilled "
                f"models do; '{cls.family}' guides by two predictions. Choose a model that is not distilled so."
            )
        return index

    @classmethod
    def check_options(cls, folder: Path, options: DDIMOptions) -> None:
        cls.noise_range(folder, options.steps)

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, C, h, w) float32 latents at the first sigma of ``options.steps`` steps."""
        first = self.sigmas(self.options.steps)[:1]
        return super().initial_latents(generators) * flow_length(first)

    def predicted(self, modules: Modules, noisy: Tensor, timestep: Tensor, rows: Rows) -> Tensor:
        return modules["unet"](noisy, timestep, return_dict=False, **self.conditions(rows, noisy))[0]

    @abstractmethod
    def conditions(self, rows: Rows, noisy: Tensor) -> dict[str, Any]:
        """Return the UNet's arguments other than latents and time."""

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return the guided prediction; rescaling applies to the UNet's own prediction type, not to a velocity."""
        if self.options.guidance_rescale == 0:
            return super().guide(negative, positive, sigma, latents)
        prediction = PREDICTIONS[self.pipeline.scheduler.config.prediction_type]
        # In the dtype of the UNet's inputs.
        latents = latents.to(self.settings.dtype)
        _, at = self._seen(latents, sigma)
        without, with_text = (prediction.predicted(latents, each, sigma, at) for each in (negative, positive))
        guided = rescaled_guided(without, with_text, self.settings.guidance_scale, self.options.guidance_rescale)
        return prediction.velocity(guided, at)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        rescale = self.options.guidance_rescale
        return {"guidance_rescale": rescale} if rescale else {}

    def clean_latents(self, latents: Tensor) -> Tensor:
        """Return the latents that the pipeline decodes, from final latents at the last of ``options.steps`` levels."""
        return clean_ends(latents, self.sigmas(self.options.steps)[-1:])

    def decoded(self, latents: Tensor) -> Tensor:
        return self.decode_scaled(self.clean_latents(latents))

    def decoded_clean(self, latents: Tensor) -> Tensor:
        return self.decode_scaled(latents)


def _without_offset(scheduler: Any, steps: int) -> dict[str, Any]:
    """Return the options that a scheduler needs for a number of steps: a chain over every timestep of training has no
    offset, with which Stable Diffusion's would begin at timestep 1000 of 0 to 999."""
    return {"steps_offset": 0} if steps == scheduler.config.num_train_timesteps else {}


def _levels(scheduler: Any, steps: int) -> Tensor:
    """Return the (T + 1,) float64 sigmas of DDIM's steps; raise ConfigError if the steps do not lead from one scheduler
    timestep to another, or exceed their number."""
    trained, count = scheduler.config.num_train_timesteps, len(scheduler.alphas_cumprod)
    if scheduler.config.timestep_spacing == "trailing" and trained % steps:
        raise ConfigError(
            f"rollout.steps or evaluate.steps is {steps}, but the scheduler of model.path has timestep_spacing "
            f"'trailing', with which DDIM's steps meet its timesteps only where {trained} is a multiple of their "
            "number. Change the steps (and model.options.steps, where the model has it)."
        )
    if steps <= trained:
        scheduler = scheduler.from_config(scheduler.config, **_without_offset(scheduler, steps))
        scheduler.set_timesteps(steps)
    if steps > trained or int(scheduler.timesteps.max()) >= count:
        raise ConfigError(
            f"rollout.steps or evaluate.steps is {steps}, but the scheduler of model.path knows {count} noise levels, "
            f"and its steps would leave them (num_train_timesteps {trained}, steps_offset "
            f"{scheduler.config.steps_offset}). Lower the steps (and model.options.steps, where the model has it)."
        )
    last = scheduler.timesteps[-1] - trained // steps
    final = scheduler.alphas_cumprod[last] if last >= 0 else scheduler.final_alpha_cumprod
    return flow_sigma(torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], final.reshape(1)]))
