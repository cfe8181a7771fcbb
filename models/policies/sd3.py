"""Stable Diffusion 3 and 3.5 (StableDiffusion3Pipeline).

Prompt encoding, latent preparation and image post-processing are the pipeline's own methods. The ODE with this adapter
equals ``StableDiffusion3Pipeline.__call__`` bit for bit, guidance included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.registry import create
from models.guidance import guided
from models.policies.base import Conditioning, Part, Policy, PolicySettings

_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")


@dataclass(frozen=True, slots=True, kw_only=True)
class SD3Options:
    """Options of the family."""

    max_sequence_length: int = 256
    """T5 tokens; 1 for a model without T5, whose text is then padded by one row of zeros."""
    schedule: Literal["scheduler", "linear"] = "scheduler"
    """The scheduler's own sigmas, or 1, (T-1)/T, ..., 1/T, 0 before its shift (``sigmas=`` of the pipeline)."""


class SD3(Policy):
    """Adapter for StableDiffusion3Pipeline."""

    blocks = ("transformer_blocks",)
    # Flow-GRPO's targets for SD3.5: the attention projections of both streams.
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(self, pipeline: StableDiffusion3Pipeline, settings: PolicySettings, options: SD3Options) -> None:
        """Wrap a loaded pipeline; see ``load``."""
        super().__init__(settings)
        self.pipeline = pipeline
        self.options = options
        for module in (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
            if module is not None:
                module.requires_grad_(False).eval()
        if settings.gradient_checkpointing and pipeline.transformer is not None:
            pipeline.transformer.enable_gradient_checkpointing()

    @classmethod
    def load(cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]) -> SD3:
        """Load the wanted parts of a StableDiffusion3Pipeline folder."""
        chosen = create({"sd3": f"{__name__}:SD3Options"}, "sd3", options, what="model.options of")
        index = _read_index(folder)
        _check_size(folder, settings)
        absent: dict[str, None] = {name: None for name in _TEXT if not index.get(name, [None])[0]}
        if Part.TEXT not in parts:
            absent.update(dict.fromkeys(_TEXT))
        if Part.DENOISER not in parts:
            absent["transformer"] = None
        if Part.VAE not in parts:
            absent["vae"] = None
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            folder, dtype=settings.dtype, local_files_only=True, image_encoder=None, feature_extractor=None, **absent
        )
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to(settings.device)
        if pipeline.vae is not None:
            # Decoding is a small part of the work, and rewards see its rounding.
            pipeline.vae.to(torch.float32)
        if pipeline.transformer is None:
            # encode_prompt reads widths from the transformer's config; a meta copy has the config and no weights.
            with torch.device("meta"):
                pipeline.transformer = SD3Transformer2DModel.from_config(
                    _read_json(folder / "transformer" / "config.json")
                )
        return cls(pipeline, settings, chosen)

    @property
    def denoisers(self) -> dict[str, Any]:
        """The transformer."""
        return {"transformer": self.pipeline.transformer}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
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

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, C, h, w) float32 noise."""
        channels = self.pipeline.transformer.config.in_channels
        height, width = self.settings.height, self.settings.width
        return self.pipeline.prepare_latents(  # type: ignore[no-any-return]
            len(generators), channels, height, width, torch.float32, self.settings.device, list(generators)
        )

    def sigmas(self, steps: int) -> Tensor:
        """Return the scheduler's sigmas, as the pipeline sets them."""
        scheduler = self.pipeline.scheduler
        arguments: dict[str, Any] = {}
        if scheduler.config.get("use_dynamic_shifting"):
            arguments["mu"] = self._mu()
        if self.options.schedule == "linear":
            arguments["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        else:
            arguments["num_inference_steps"] = steps
        scheduler.set_timesteps(device=self.settings.device, **arguments)
        return scheduler.sigmas.clone().float()  # type: ignore[no-any-return]

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        denoisers: Mapping[str, nn.Module] | None = None,
    ) -> Tensor:
        """Return velocities; with guidance, one forward of 2B rows, negative first, as in the pipeline.

        When gradients are wanted of the conditional half only, the negative half is a forward of its own without any:
        Flow-GRPO runs both with gradient and detaches one, which gives the same gradient at more cost.
        """
        transformer = (denoisers or self.denoisers)["transformer"]
        if conditioning.negative is None:
            return self._call(transformer, latents, sigma, conditioning.positive).float()
        if torch.is_grad_enabled() and not self.settings.train_negative:
            with torch.no_grad():
                negative = self._call(transformer, latents, sigma, conditioning.negative)
            positive = self._call(transformer, latents, sigma, conditioning.positive)
            return guided(negative, positive, self.settings.guidance_scale).float()
        both = {k: torch.cat([conditioning.negative[k], v]) for k, v in conditioning.positive.items()}
        doubled: Tensor = self._call(transformer, torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
        negative, positive = doubled.chunk(2)
        return guided(negative, positive, self.settings.guidance_scale).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images as the pipeline's post-processing rounds them."""
        vae = self.pipeline.vae
        scaled = (latents.to(vae.dtype) / vae.config.scaling_factor) + vae.config.shift_factor
        image = vae.decode(scaled, return_dict=False)[0]
        unit: Tensor = self.pipeline.image_processor.postprocess(image, output_type="pt")
        return (unit.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def save_lora(self, folder: Path) -> None:
        """Write ``pytorch_lora_weights.safetensors`` with the adapter's settings in its metadata."""
        transformer = self.pipeline.transformer
        StableDiffusion3Pipeline.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(transformer),
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )

    def _call(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        train_timesteps = self.pipeline.scheduler.config.num_train_timesteps
        dtype = self.settings.dtype
        # Trained weights are float32 whatever the forward's dtype; autocast brings the two together.
        with torch.autocast(latents.device.type, dtype, enabled=dtype != torch.float32):
            return transformer(  # type: ignore[no-any-return]
                hidden_states=latents.to(dtype),
                timestep=sigma * train_timesteps,
                encoder_hidden_states=rows["prompt_embeds"],
                pooled_projections=rows["pooled"],
                return_dict=False,
            )[0]

    def _mu(self) -> float:
        config, patch = self.pipeline.scheduler.config, self.pipeline.transformer.config.patch_size
        scale = self.pipeline.vae_scale_factor
        tokens = (self.settings.height // scale // patch) * (self.settings.width // scale // patch)
        return float(
            calculate_shift(
                tokens,
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.16),
            )
        )


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    if not path.is_file():
        raise ConfigError(f"model.path '{folder}' holds no model_index.json; it is not a diffusers pipeline folder.")
    index = _read_json(path)
    if index.get("_class_name") != "StableDiffusion3Pipeline":
        raise ConfigError(
            f"model.path '{folder}' holds a {index.get('_class_name')}, but model.policy 'sd3' needs a "
            "StableDiffusion3Pipeline. Choose the policy of that family, or another model."
        )
    return index


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _check_size(folder: Path, settings: PolicySettings) -> None:
    vae, transformer = (_read_json(folder / part / "config.json") for part in ("vae", "transformer"))
    multiple = 2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"]
    for name, value in (("height", settings.height), ("width", settings.width)):
        if value % multiple:
            low = max(multiple, value // multiple * multiple)
            raise ConfigError(
                f"model.{name} is {value}, but this model takes multiples of {multiple}. "
                f"The nearest are {low} and {low + multiple}."
            )
