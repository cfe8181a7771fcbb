"""Stable Diffusion 3 and 3.5 (StableDiffusion3Pipeline)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from flowmill.models.library_loading import read_json
from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.pipeline import JOINT_ATTENTION, Modules, PipelinePolicy, Rows
from flowmill.models.policies.pipeline_configs import FLOW, Fields
from flowmill.models.policies.tokenization import CLIP_LIMIT, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class SD3Options:
    """Options of the family."""

    max_sequence_length: PositiveInt = 256
    """T5 tokens, 512 at most; 1 for a model without T5, whose text is then padded with one row of zeros."""
    schedule: Literal["scheduler", "linear"] = "scheduler"
    """The scheduler's own sigmas, or 1, (T-1)/T, ..., 1/T, 0 before its shift (``sigmas=`` of the pipeline)."""


class SD3(PipelinePolicy):
    """Adapter for StableDiffusion3Pipeline."""

    pipeline_name = "StableDiffusion3Pipeline"
    family = "sd3"
    options_type = SD3Options
    options: SD3Options
    text_parts = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    unused_parts = ("image_encoder", "feature_extractor")
    readers = (
        Reader(tokenizer="tokenizer", limit=CLIP_LIMIT),
        Reader(tokenizer="tokenizer_2", limit=CLIP_LIMIT),
        Reader(tokenizer="tokenizer_3"),
    )
    joint_guidance = True
    schedulers: ClassVar[Mapping[str, Fields]] = {
        "FlowMatchEulerDiscreteScheduler": replace(FLOW, followed=FLOW.followed | {"num_train_timesteps"})
    }
    max_shift = 1.16
    blocks = ("transformer_blocks",)
    # Flow-GRPO's targets for SD3.5: the attention projections of both streams.
    lora_targets = JOINT_ATTENTION

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D) and ``pooled`` (B, P) in the model's dtype."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            device=self.settings.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def sigmas(self, steps: int) -> Tensor:
        if self.options.schedule == "linear":
            return super().sigmas(steps)
        scheduler = self.pipeline.scheduler
        dynamic = {"mu": self.shift_mu(steps)} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(num_inference_steps=steps, device=self.settings.device, **dynamic)
        return scheduler.sigmas.clone().float()

    def token_width(self) -> int:
        return int(self.pipeline.vae_scale_factor * self.pipeline.transformer.config.patch_size)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer; its time argument runs from 0 to 1000."""
        return modules["transformer"](
            hidden_states=latents,
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=rows["prompt_embeds"],
            pooled_projections=rows["pooled"],
            return_dict=False,
        )[0]

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; the linear schedule is passed as explicit sigmas."""
        call = super().pipeline_call(steps, negative_prompt)
        if self.options.schedule != "linear":
            return call
        arguments = {name: value for name, value in call.arguments.items() if name != "num_inference_steps"}
        return replace(call, arguments={**arguments, "sigmas": np.linspace(1.0, 1 / steps, steps).tolist()})

    @classmethod
    def complete(cls, folder: Path) -> None:
        """Add a T5 that returns zeros to a folder without one: the pipeline cannot be loaded without it."""
        if "text_encoder_3" not in cls.missing_parts(folder):
            return
        from flowmill.models.policies.dummy_components import silent_t5

        path = folder / "model_index.json"
        index = read_json(path)
        encoder, tokenizer = silent_t5(read_json(folder / "transformer" / "config.json")["joint_attention_dim"])
        for name, part in (("text_encoder_3", encoder), ("tokenizer_3", tokenizer)):
            part.save_pretrained(folder / name)
            index[name] = ["transformers", type(part).__name__]
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        vae, transformer = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        return int(2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"])
