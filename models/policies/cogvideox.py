"""CogVideoX text to video (CogVideoXPipeline): a transformer over clips and a schedule that starts from pure noise.

Its DDIM scheduler writes DDIM's step as ``a_t x + b_t x0``. This equals the step of ``flowmill.models.policies.ddim``
on another schedule, with levels from 1 (no signal at the first timestep) to 0 (alpha_bar is 1 after the last).
Guidance has the same scale at all steps, as with the pipeline's default, ``use_dynamic_cfg`` false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import ClipLengths
from flowmill.models.library_loading import read_json
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.ddim import DDIMPolicy
from flowmill.models.policies.diffusion import DiffusionSettings, Images
from flowmill.models.policies.pipeline import Modules, Rows
from flowmill.models.policies.pipeline_configs import Fields, whole
from flowmill.models.policies.tokenization import Reader

#: Every published schedule starts from pure noise and ends without noise; the two schedulers have the same options.
_SCHEDULE = Fields(
    followed=frozenset({"beta_start", "beta_end", "beta_schedule", "trained_betas", "snr_shift_scale"}),
    # Neither scheduler reads the first three, and trailing steps have no offset.
    moot=frozenset({"clip_sample", "clip_sample_range", "sample_max_value", "steps_offset"}),
    allowed={
        "prediction_type": ("v_prediction", "sample"),
        "rescale_betas_zero_snr": (True,),
        # The first folders set linspace, whose timesteps DDIM's steps miss; their authors' scripts set trailing.
        "timestep_spacing": ("trailing", "linspace"),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CogVideoXOptions:
    """Options of the family."""

    max_sequence_length: PositiveInt = 226
    """T5 tokens; models without rotary positions only take the number in their config."""


class CogVideoX(DDIMPolicy, ClipPolicy):
    """Adapter for CogVideoXPipeline; latents are (B, f, 16, h, w)."""

    pipeline_name = "CogVideoXPipeline"
    family = "cogvideox"
    options_type = CogVideoXOptions
    options: CogVideoXOptions
    walked = "CogVideoXDDIMScheduler"
    walked_options: ClassVar[Mapping[str, Any]] = {"timestep_spacing": "trailing"}
    # The DPM scheduler's own solver draws noise at every step; DDIM uses its schedule.
    schedulers: ClassVar[Mapping[str, Fields]] = dict.fromkeys(
        ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"), _SCHEDULE
    )
    text_parts = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer"),)
    # The autoencoder decodes an even number of latents to four frames each, including the first.
    lengths = ClipLengths(every=8)
    blocks = ("transformer_blocks",)
    # The targets of diffusers' training script.
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        index = super().check_folder(folder, settings)
        with whole(folder):
            config = read_json(folder / "transformer" / "config.json")
        if config.get("patch_size_t") is not None:
            raise ConfigError(
                f"model.path '{folder}' is a CogVideoX 1.5 (patch_size_t {config['patch_size_t']} of its transformer), "
                f"which takes several latents of time as one; model.policy '{cls.family}' gives it each alone. Take a "
                "model of the first CogVideoX, such as 'zai-org/CogVideoX-2b' or 'zai-org/CogVideoX-5b'."
            )
        return index

    @classmethod
    def check_options(cls, folder: Path, options: CogVideoXOptions) -> None:
        """Check that the model has positions for the text, and levels for every timestep."""
        cls.noise_range(folder, 1)
        with whole(folder):
            config = read_json(folder / "transformer" / "config.json")
        length = config.get("max_text_seq_length", 226)
        if not config.get("use_rotary_positional_embeddings") and options.max_sequence_length != length:
            raise ConfigError(
                f"model.options.max_sequence_length is {options.max_sequence_length}, but the transformer of "
                f"model.path '{folder}' has positions for {length} tokens of text, before those of the clip "
                f"(max_text_seq_length). Set it to {length}."
            )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D)."""
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=self.options.max_sequence_length,
            device=self.settings.device,
        )
        return {"prompt_embeds": embeds}

    def noise_size(self) -> tuple[int, ...]:
        return self.settings.frames, self.settings.height, self.settings.width

    def predicted(self, modules: Modules, noisy: Tensor, timestep: Tensor, rows: Rows) -> Tensor:
        """Call the transformer; guidance is computed in float32, as in the pipeline."""
        predicted: Tensor = modules["transformer"](
            hidden_states=noisy,
            encoder_hidden_states=rows["prompt_embeds"],
            timestep=timestep,
            image_rotary_emb=self._rotary(noisy),
            return_dict=False,
        )[0]
        return predicted.float()

    def _rotary(self, noisy: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the positions of a clip's tokens, (L, D) each, for models that take them."""
        if not self.pipeline.transformer.config.use_rotary_positional_embeddings:
            return None
        size = (self.settings.height, self.settings.width, noisy.shape[1])
        cosines, sines = self.table(noisy.device, self._places, *size)
        return cosines, sines

    def _places(self, height: int, width: int, frames: int) -> Tensor:
        place = self.pipeline._prepare_rotary_positional_embeddings
        return torch.stack(place(height, width, frames, torch.device("cpu")))

    def decoded(self, latents: Tensor) -> Tensor:
        return self.pipeline.decode_latents(latents.to(self.pipeline.vae.dtype))

    def encoded(self, media: Tensor) -> Tensor:
        latents = self.likeliest(media).permute(0, 2, 1, 3, 4)
        return latents * self.pipeline.vae_scaling_factor_image
