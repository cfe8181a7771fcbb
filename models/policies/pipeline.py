"""Base class of families that use a diffusers pipeline's methods for prompt encoding, latents and post-processing.

A family names its pipeline and calls its denoiser; this module has guidance and LoRA files, and
``flowmill.models.policies.folder_policy`` loads folders. Functions that load or call a model import diffusers
themselves, here and in the families: commands that only read a family's properties should not wait seconds for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import option_names
from flowmill.models.maths.conditioning import Conditioning, Guided
from flowmill.models.maths.guidance import guided
from flowmill.models.policies.attention import set_attention
from flowmill.models.policies.diffusion import DiffusionSettings, Images, PipelineCall
from flowmill.models.policies.folder_policy import FolderPolicy
from flowmill.models.policies.tokenization import cut_notes
from flowmill.models.text.chat_templates import guard_template
from flowmill.models.text.control_tokens import as_text, first_mark
from flowmill.models.weights.lora_files import save_lora
from flowmill.models.weights.lora_start import pipeline_adapter
from flowmill.models.weights.sharding import units


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of families whose only option is the length of text."""

    max_sequence_length: PositiveInt = 512
    """Text tokens; prompts are padded to it, so that rows of different prompts can be joined."""


Modules = Mapping[str, nn.Module]
Rows = Mapping[str, Tensor]
#: Attention projections of both streams, image and text, in transformers with joint attention.
JOINT_ATTENTION = tuple(
    f"attn.{name}" for name in "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out".split()
)
#: Projections of self-attention and of cross-attention to text, in transformers that have both.
APART_ATTENTION = tuple(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))


def joined(rows: Sequence[Rows]) -> dict[str, Tensor]:
    """Return the tensors of several rows by name, joined in the first dimension."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def padded_text(embeds: Tensor, most: int) -> dict[str, Tensor]:
    """Return ``prompt_embeds`` (1, ``most``, D), padded with zeros, and ``text_length`` (1,) int64, of (1, L, D)."""
    length = embeds.shape[1]
    padded = F.pad(embeds, (0, 0, 0, most - length))
    return {"prompt_embeds": padded, "text_length": torch.tensor([length], device=embeds.device)}


def row_by_row(call: Callable[[Tensor, Tensor, Rows], Tensor], latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
    """Return a model's predictions, computed row by row. Batching rows of equal length would make a row's result depend
    on its neighbors, and ranks that wait for each other must call equally often."""
    predictions = []
    for row in range(len(latents)):
        part = {name: tensor[row : row + 1] for name, tensor in rows.items()}
        predictions.append(call(latents[row : row + 1], sigma[row : row + 1], part))
    return torch.cat(predictions)


def thousandths(sigma: Tensor) -> Tensor:
    """Return sigma as pipelines pass it to models whose time runs from 0 to 1: via a timestep, with its rounding."""
    return sigma * 1000 / 1000


class PipelinePolicy(FolderPolicy):
    """Adapter for one diffusers pipeline class."""

    joint_guidance: ClassVar[bool] = False
    """The pipeline runs both halves of guidance in one forward, negative first."""
    max_shift: ClassVar[float] = 1.15
    """The pipeline's default of ``max_shift``, if the scheduler's config has none."""
    one_by_one: ClassVar[bool] = False
    """The denoiser is called for each row alone, as rows differ in their number of tokens."""
    asks_layout: ClassVar[bool] = False
    """The denoiser reads tensor values that describe the layout of its tokens."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    missing_arguments: ClassVar[frozenset[str]] = frozenset()
    """Arguments of other pipelines that this one lacks."""
    takes_images: ClassVar[bool] = False
    """The first argument of the pipeline's ``prepare_latents`` is the images to start from."""

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        super().__init__(pipeline, settings, options)
        for tokenizer in self._tokenizers:
            guard_template(tokenizer)
        for module in self.modules().values():
            module.requires_grad_(False).eval()
        for module in self.denoisers.values():
            self.prepare(module)

    def scale_of(self, pixels: int) -> None:
        """Set the width of a latent in pixels, for sizes of another model of the family."""
        self.pipeline.vae_scale_factor = pixels

    @classmethod
    def read_adapter(cls, path: str) -> Any:
        """Read adapters of the denoisers, in peft's format or any format of the pipeline's own loader."""
        return pipeline_adapter(path, cls.pipeline_name, cls.denoiser_names)

    @cached_property
    def _tokenizers(self) -> list[Any]:
        parts = [getattr(part, "tokenizer", part) for part in self.pipeline.components.values()]
        return [part for part in parts if hasattr(part, "added_tokens_decoder")]

    def first_mark(self, text: str) -> str | None:
        return next((mark for each in self._tokenizers if (mark := first_mark(each, text)) is not None), None)

    def as_plain(self, text: str) -> str:
        for tokenizer in self._tokenizers:
            text = as_text(tokenizer, text)
        return text

    def cut_notes(self, prompts: Sequence[str]) -> list[str]:
        tokenizers = {reader.tokenizer: getattr(self.pipeline, reader.tokenizer, None) for reader in self.readers}
        return list(cut_notes(self.readers, tokenizers, self.options, prompts))

    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return the rows of ``encode_one``, for prompts that are encoded one by one."""
        started = [()] * len(prompts) if images is None else images
        return joined([self.encode_one(*each) for each in zip(prompts, started, strict=True)])

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return one row of every conditioning tensor; a family overrides this or ``encode``. ``images``: start images
        of the prompt, (H, W, 3) uint8 each."""
        raise NotImplementedError(f"{type(self).__name__} has neither encode_one nor encode")

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, ...) float32 noise, as the pipeline's own method draws it."""
        options = (self.noise_channels(), *self.noise_size(), torch.float32, self.settings.device, list(generators))
        drawn = self.pipeline.prepare_latents(*(None,) * self.takes_images, len(generators), *options)
        return drawn[0] if isinstance(drawn, tuple) else drawn

    def noise_channels(self) -> int:
        """Return the number of channels that the pipeline passes to ``prepare_latents``."""
        return int(next(iter(self.denoisers.values())).config.in_channels)

    def noise_size(self) -> tuple[int, ...]:
        """Return the size that the pipeline passes to ``prepare_latents``."""
        return self.settings.height, self.settings.width

    def sigmas(self, steps: int) -> Tensor:
        """Return 1, (T-1)/T, ..., 1/T, 0 after the scheduler's shift, as the pipeline sets them."""
        scheduler = self.pipeline.scheduler
        dynamic = {"mu": self.shift_mu(steps)} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=self.settings.device, **dynamic)
        return scheduler.sigmas.clone().float()

    def shift_mu(self, steps: int) -> float:
        """Return the dynamic shift for the size of the image."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config, bounds = self.pipeline.scheduler.config, self.shift_bounds()
        return float(calculate_shift(self.image_tokens(), *(config.get(name, value) for name, value in bounds.items())))

    def shift_bounds(self) -> Mapping[str, float]:
        """Return the default bounds of the dynamic shift, in the order of its formula."""
        return {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": self.max_shift}

    def image_tokens(self) -> int:
        """Return the number of latent tokens of an image."""
        height, width = self.grid()
        return height * width

    def grid(self) -> tuple[int, int]:
        """Return the rows and columns of an image's latent tokens."""
        unit = self.token_width()
        return self.settings.height // unit, self.settings.width // unit

    def token_width(self) -> int:
        """Return the width of a latent token in pixels."""
        return int(self.pipeline.vae_scale_factor * 2)

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        denoisers: Mapping[str, nn.Module] | None = None,
    ) -> Tensor:
        """Return velocities, with guidance as the pipeline applies it; see ``guided_velocity``."""
        return self._guided(denoisers or self.denoisers, latents, sigma, conditioning).velocity

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return velocities and the predictions for the negative prompt.

        If only the conditional half needs gradients, the negative half is a separate forward without gradient:
        Flow-GRPO runs both with gradient and detaches one, which gives the same gradient at a higher cost. A negative
        prediction that is already available is not computed again.
        """
        return self._guided(self.denoisers, latents, sigma, conditioning)

    def _guided(self, modules: Modules, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        negative, without = conditioning.negative, conditioning.unconditional
        if negative is None:
            return Guided(self._predict(modules, latents, sigma, conditioning.positive).float(), None)
        apart = torch.is_grad_enabled() and not self.settings.train_negative
        if without is None and not apart and self.joint_guidance:
            both = {name: torch.cat([negative[name], rows]) for name, rows in conditioning.positive.items()}
            doubled = self._predict(modules, torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
            without, positive = doubled.chunk(2)
        else:
            if without is None:
                with torch.set_grad_enabled(torch.is_grad_enabled() and self.settings.train_negative):
                    without = self._predict(modules, latents, sigma, negative)
            positive = self._predict(modules, latents, sigma, conditioning.positive)
        return Guided(self.guide(without.to(positive.dtype), positive, sigma, latents).float(), without.float())

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return the guided prediction of (B, ...) predictions for (B, ...) latents."""
        return guided(negative, positive, self.settings.guidance_scale)

    @abstractmethod
    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Return the denoiser's (B, ...) velocity prediction for latents in the model's dtype, without guidance."""

    def save_lora(self, folder: Path) -> None:
        """Write the LoRA file for the pipeline's ``load_lora_weights``, with the adapter's settings as metadata."""
        ((name, module),) = self.denoisers.items()
        save_lora(self.pipeline_name, folder, name, module)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments for size, steps, guidance and length of text, and ``more_arguments``."""
        settings = self.settings
        arguments: dict[str, Any] = {
            "height": settings.height,
            "width": settings.width,
            "num_inference_steps": steps,
            self.guidance_argument: settings.guidance_scale,
        }
        if negative_prompt is not None:
            arguments["negative_prompt"] = negative_prompt
        if "max_sequence_length" in option_names(self.options_type):
            arguments["max_sequence_length"] = self.options.max_sequence_length
        arguments |= self.more_arguments(steps)
        return PipelineCall(
            arguments={name: each for name, each in arguments.items() if name not in self.missing_arguments},
            vae_tiling=settings.vae_tiling,
            heard=spec_of(self.family).frame_rate is not None,
        )

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Return further arguments of the pipeline, and other values of usual ones, for a number of steps."""
        return {}

    def modules(self) -> dict[str, nn.Module]:
        names = (*self.text_parts, *self.denoiser_names, *self.decoder_names)
        components = {name: getattr(self.pipeline, name, None) for name in names}
        return {name: module for name, module in components.items() if isinstance(module, nn.Module)}

    def _predict(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        dtype, call = self.settings.dtype, partial(self.call, modules)
        # Trained weights are always float32; autocast converts them to the forward's dtype.
        with torch.autocast(latents.device.type, dtype, enabled=dtype != torch.float32):
            if self.one_by_one:
                return row_by_row(call, latents.to(dtype), sigma, rows)
            return call(latents.to(dtype), sigma, rows)

    def prepare(self, module: Any) -> None:
        """Apply the settings to a denoiser: gradient checkpointing, attention, compilation."""
        if self.settings.gradient_checkpointing:
            module.enable_gradient_checkpointing()
        if self.settings.attention is not None:
            set_attention(module, self.settings.attention)
        if self.settings.compile:
            compile_blocks(module, self.blocks)


def compile_blocks(module: Any, blocks: Sequence[str]) -> None:
    """Compile a denoiser's blocks in place: those that diffusers declares as repeated, else those in the named lists.
    Compiled code is stored in torch's disk cache (``TORCHINDUCTOR_CACHE_DIR``) for later processes."""
    # A block has a graph with gradient and one without, with and without adapters, and some blocks differ.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if module._repeated_blocks:
        module.compile_repeated_blocks()
        return
    for block in units(module, blocks):
        block.compile()
