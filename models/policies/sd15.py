"""Stable Diffusion 1.x (StableDiffusionPipeline with DDIM): epsilon or v prediction, seen as a flow.

With a = sqrt(alpha_bar), b = sqrt(1 - alpha_bar), the variance-preserving latents x = a x0 + b eps become flow latents
x / (a + b) at sigma = b / (a + b), and the velocity is eps - x0. In these coordinates the deterministic DDIM step is
the Euler step, and DDPO's DDIM step with eta is the sampler ``ddim`` (log-probs differ by a constant that cancels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from configs.errors import ConfigError
from models.maths.transitions import expand
from models.policies.diffusion import DiffusionSettings, PipelineCall, SchedulerChoice
from models.policies.folders import DISCRETE, Fields
from models.policies.pipeline import Modules, PipelinePolicy, Rows
from models.policies.reading import CLIP_LIMIT, Reader

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SD15Options:
    """Options of the family."""

    steps: int = 50
    """Denoising steps, which must be those of the rollout and the evaluation: they fix where the noise begins."""


class SD15(PipelinePolicy):
    """Adapter for StableDiffusionPipeline; latents are (B, 4, h, w)."""

    pipeline_name = "StableDiffusionPipeline"
    family = "sd15"
    options_type = SD15Options
    options: SD15Options
    text_parts = ("text_encoder", "tokenizer")
    unused_parts = ("image_encoder", "feature_extractor", "safety_checker")
    denoiser_names = ("unet",)
    readers = (Reader(tokenizer="tokenizer", limit=CLIP_LIMIT),)
    joint_guidance = True
    # All of one training schedule, which DDIM follows whichever of them the folder names.
    schedulers = DISCRETE
    # Nothing is loaded that checks images.
    settings_read = Fields(moot=frozenset({"requires_safety_checker"}))
    size_unit = 8
    blocks = ("down_blocks", "mid_block", "up_blocks")
    # DDPO's targets: the attention projections.
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: SD15Options) -> None:
        """Wrap a loaded pipeline, with DDIM as its scheduler."""
        from diffusers import DDIMScheduler

        super().__init__(pipeline, settings, options)
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Sequence[np.ndarray] | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, 77, D)."""
        embeds, _ = self.pipeline.encode_prompt(list(prompts), self.settings.device, 1, False)
        return {"prompt_embeds": embeds}

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, 4, h, w) float32 latents at the first sigma of ``options.steps`` steps."""
        settings, channels = self.settings, self.pipeline.unet.config.in_channels
        size = (settings.height, settings.width)
        noise: Tensor = self.pipeline.prepare_latents(
            len(generators), channels, *size, torch.float32, settings.device, list(generators)
        )
        first = self.sigmas(self.options.steps)[:1]
        return noise * _length(first)

    def sigmas(self, steps: int) -> Tensor:
        """Return b / (a + b) at the scheduler's timesteps, and after its last step.

        Raises:
            ConfigError: DDIM's steps do not lead from one of its timesteps to the next.
        """
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(steps)
        trained = scheduler.config.num_train_timesteps
        if scheduler.config.timestep_spacing == "trailing" and trained % steps:
            raise ConfigError(
                f"rollout.steps or evaluate.steps is {steps}, but the scheduler of model.path has timestep_spacing "
                f"'trailing', with which DDIM's steps meet its timesteps only where {trained} is a multiple of their "
                "number. Change the steps (and model.options.steps)."
            )
        last = scheduler.timesteps[-1] - scheduler.config.num_train_timesteps // steps
        final = scheduler.alphas_cumprod[last] if last >= 0 else scheduler.final_alpha_cumprod
        alphas = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], final.reshape(1)])
        return _sigma(alphas).to(self.settings.device).float()

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the UNet at the timestep each sigma belongs to; return eps - x0."""
        table = self.pipeline.scheduler.alphas_cumprod.to(sigma.device)
        timestep = (_sigma(table)[None, :] - sigma[:, None]).abs().argmin(1)
        alpha = expand(table[timestep], latents)
        a, b = alpha.sqrt(), (1 - alpha).sqrt()
        noisy = latents * (a + b)
        predicted = modules["unet"](noisy.to(latents.dtype), timestep, rows["prompt_embeds"], return_dict=False)[0]
        velocity: Tensor
        if self.pipeline.scheduler.config.prediction_type == "v_prediction":
            # v = a eps - b x0 (arXiv 2202.00512), so that eps = a v + b x and x0 = a x - b v.
            velocity = (a * predicted + b * noisy) - (a * noisy - b * predicted)
        else:
            velocity = predicted - (noisy - b * predicted) / a
        return velocity

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments and DDIM, whichever scheduler the folder names."""
        # DDIM would clip where the config of another scheduler says nothing of it.
        ddim = SchedulerChoice(name="DDIMScheduler", options={"clip_sample": False}, from_config=True)
        return replace(super().pipeline_call(steps, negative_prompt), scheduler=ddim)

    def decoded(self, latents: Tensor) -> Tensor:
        """Return what the autoencoder makes of latents."""
        last = self.sigmas(self.options.steps)[-1:]
        return self.decode_scaled(latents / _length(last).to(latents))


def _sigma(alpha: Tensor) -> Tensor:
    a, b = alpha.double().sqrt(), (1 - alpha.double()).sqrt()
    return b / (a + b)


def _length(sigma: Tensor) -> Tensor:
    """Return 1 / (a + b), the factor from variance-preserving to flow latents at a sigma."""
    return torch.sqrt((1 - sigma) ** 2 + sigma**2)
