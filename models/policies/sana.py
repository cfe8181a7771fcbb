"""SANA (SanaPipeline) and SANA-Video (SanaVideoPipeline, with Wan's autoencoder): linear attention over tokens of 32
pixels; a language model encodes text.

The pipeline prepends an instruction to prompts but not to negative prompts, and keeps the last tokens of the two
together. ``encode`` cannot distinguish prompts from negative prompts: an empty text, the pipeline's default negative
prompt, is encoded without the instruction, and any other negative prompt is refused with the instruction.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.euler_grid import EulerGridPolicy
from flowmill.models.policies.pipeline import APART_ATTENTION, Modules, Rows
from flowmill.models.policies.pipeline_configs import DPM_FLOW, Fields
from flowmill.models.policies.tokenization import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class SanaOptions:
    """Options of the family."""

    max_sequence_length: PositiveInt = 300
    """Gemma tokens that are retained; prompts are padded to this length."""
    instruction: bool = True
    """Prepend the pipeline's own instruction, to describe more, to prompts."""
    flow_shift: NonNegativeFloat | None = None
    """Shift of the noise levels; the pipeline's when absent."""


class Sana(EulerGridPolicy):
    """Adapter for SanaPipeline; latents are (B, 32, h, w)."""

    pipeline_name = "SanaPipeline"
    family = "sana"
    options_type = SanaOptions
    options: SanaOptions
    text_parts = ("text_encoder", "tokenizer")
    # With the instruction, one of the retained tokens is the last of the instruction.
    readers = (Reader(tokenizer="tokenizer", further=-1, written=lambda _, text: text.lower().strip()),)
    schedulers: ClassVar[Mapping[str, Fields]] = {**EulerGridPolicy.schedulers, "DPMSolverMultistepScheduler": DPM_FLOW}
    joint_guidance = True
    size_unit = 32
    blocks = ("transformer_blocks",)
    # Self-attention over the image, attention to the text.
    lora_targets = APART_ATTENTION

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``mask`` (1, L) int64."""
        instruction = self._instruction if self.options.instruction and prompt else None
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            device=self.settings.device,
            max_sequence_length=self.options.max_sequence_length,
            complex_human_instruction=instruction,
        )
        return {"prompt_embeds": embeds, "mask": mask.long()}

    @property
    def _instruction(self) -> list[str]:
        parameter = inspect.signature(type(self.pipeline).__call__).parameters["complex_human_instruction"]
        return list(parameter.default)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer; its time argument runs from 0 to 1000, times its config's scale."""
        scale = self.pipeline.transformer.config.get("timestep_scale", 1.0)
        predicted: Tensor = modules["transformer"](
            hidden_states=latents,
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_attention_mask=rows["mask"],
            timestep=sigma * 1000 * scale,
            return_dict=False,
        )[0]
        # The pipeline computes guidance in float32.
        return predicted.float()

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Turn off binning of sizes, and the instruction if the option is off."""
        off = {} if self.options.instruction else {"complex_human_instruction": None}
        return {"use_resolution_binning": False, **off}


_AUTOENCODER = "AutoencoderKLWan"


class SanaVideo(ClipPolicy, Sana):
    """Adapter for SanaVideoPipeline; latents are (B, 16, f, h, w)."""

    pipeline_name = "SanaVideoPipeline"
    family = "sana_video"
    frames_argument = "frames"

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        kind = index["vae"][1]
        if kind != _AUTOENCODER:
            raise ConfigError(
                f"model.path '{folder}' has the autoencoder {kind}, but model.policy '{cls.family}' knows the clips of "
                f"{_AUTOENCODER} alone. Use a model of 480 pixels, such as "
                "'Efficient-Large-Model/SANA-Video_2B_480p_diffusers'."
            )
