"""What families share whose prompt encoding, latents and post-processing are a diffusers pipeline's own methods.

A family says which pipeline it is and how its denoiser is called; loading, guidance, sizes and LoRA files are here.
diffusers is imported by what loads or calls a model, here and in the families: commands that only read what a family
can do should not wait seconds for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.registry import build, option_names
from models.libraries import diffusers_class, read_json
from models.maths.conditioning import Conditioning, Guided
from models.maths.guidance import guided
from models.policies.attention import set_attention
from models.policies.base import Part
from models.policies.compilation import compile_blocks
from models.policies.decoding import DecodingPolicy
from models.policies.diffusion import DiffusionSettings, PipelineCall
from models.policies.folders import FLOW, Fields, check_index, check_scheduler, described, read_index, whole
from models.policies.reading import cut_notes
from models.weights.lora_files import save_lora
from models.weights.stored_weights import StoredWeights, check_safetensors, check_variants, empty_model, on_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of families that have none but the length of text."""

    max_sequence_length: int = 512
    """Text tokens; prompts are padded to it, so that rows of different prompts can be joined."""


Modules = Mapping[str, nn.Module]
Rows = Mapping[str, Tensor]

#: The attention projections of both streams, image and text, of transformers that join them.
JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)

#: Those of a stream's attention to itself and of its attention to text, of transformers that keep the two apart.
APART_ATTENTION = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
)


def thousandths(sigma: Tensor) -> Tensor:
    """Return sigma as pipelines hand it to models whose time runs from 0 to 1: via a timestep, with its rounding."""
    return sigma * 1000 / 1000


class PipelinePolicy(DecodingPolicy):
    """Adapter for one diffusers pipeline class."""

    pipeline_name: ClassVar[str]
    """The diffusers class whose folder this family loads."""
    folders_of: ClassVar[tuple[str, ...]] = ()
    """Further classes whose folders it loads."""
    family: ClassVar[str]
    """Name in the table, for messages."""
    options_type: ClassVar[type[Any]]
    """Dataclass of ``model.options``."""
    text_parts: ClassVar[tuple[str, ...]]
    """Components that only encode prompts."""
    unused_parts: ClassVar[tuple[str, ...]] = ()
    """Components that are never loaded."""
    denoiser_names: ClassVar[tuple[str, ...]] = ("transformer",)
    """Components that are trained; those a folder does not have are left out."""
    joint_guidance: ClassVar[bool] = False
    """The pipeline runs both halves of guidance in one forward, negative first."""
    max_shift: ClassVar[float] = 1.15
    """What the pipeline takes for ``max_shift`` where the scheduler's config has none."""
    schedulers: ClassVar[Mapping[str, Fields]] = {"FlowMatchEulerDiscreteScheduler": FLOW}
    """Scheduler classes whose schedule this family reads, and what of their configs."""
    settings_read: ClassVar[Fields] = Fields()
    """What is read of the settings in ``model_index.json``, beside the components."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """What the pipeline calls the guidance scale."""
    needs_autoencoder: ClassVar[bool] = False
    """The pipeline cannot be made without an autoencoder's config, even where only prompts are encoded."""
    size_unit: ClassVar[int] = 16
    """Height and width must be multiples of it, where the folder's config says nothing else."""

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        """Wrap a loaded pipeline; see ``load``."""
        super().__init__(pipeline, settings)
        self.options = options
        for module in self.modules().values():
            module.requires_grad_(False).eval()
        for module in self.denoisers.values():
            self.prepare(module)

    @classmethod
    def load(
        cls, folder: Path, settings: DiffusionSettings, parts: frozenset[Part], options: Mapping[str, Any]
    ) -> PipelinePolicy:
        """Load the wanted parts of a pipeline folder."""
        chosen = build(cls.options_type, cls.family, options, what="model.options of")
        index = cls.check_folder(folder, settings)
        cls.check_options(folder, chosen)
        has = [name for name in (*cls.text_parts, *cls.denoiser_names) if index.get(name, [None])[0]]
        absent: dict[str, Any] = {name: None for name in (*cls.text_parts, *cls.unused_parts) if name not in has}
        absent |= {} if Part.TEXT in parts else dict.fromkeys(cls.text_parts)
        absent |= {} if Part.DENOISER in parts and not settings.empty else dict.fromkeys(cls.denoiser_names)
        # Without an autoencoder its config alone says how large latents are; pipelines read it when they are made.
        unloaded = Part.VAE not in parts and (Part.DENOISER in parts or cls.needs_autoencoder)
        shape = described(folder / "vae", index["vae"][1]) if unloaded else None
        absent |= {} if Part.VAE in parts else {"vae": shape}
        pipeline_class = diffusers_class(cls.pipeline_name)
        given: dict[str, Any] = {**absent, **cls.components(folder, parts)}
        check_safetensors(folder, [name for name in index if name not in given])
        if settings.device_map is not None:
            given["device_map"] = settings.device_map
        # Decoding is a small part of the work, and rewards see its rounding.
        kinds = {"default": settings.dtype, "vae": torch.float32}
        loading = {"dtype": kinds, "local_files_only": True, "use_safetensors": True}
        pipeline = pipeline_class.from_pretrained(folder, **loading, **given)
        pipeline.set_progress_bar_config(disable=True)
        if shape is not None:
            pipeline.vae = None
        if settings.device_map is None:
            pipeline.to(settings.device)
        if shape is not None and Part.DENOISER in parts:
            pipeline.vae = shape
        elif pipeline.vae is not None and settings.vae_tiling:
            pipeline.vae.enable_tiling()
        for name in cls.denoiser_names:
            if name in has and getattr(pipeline, name) is None:
                module_class, config = diffusers_class(index[name][1]), read_json(folder / name / "config.json")
                make = partial(module_class.from_config, config)
                # Where only prompts are encoded, the widths in its config are all that is asked of it.
                setattr(pipeline, name, empty_model(make, settings.dtype) if Part.DENOISER in parts else on_meta(make))
        policy = cls(pipeline, settings, chosen)
        if Part.DENOISER in parts:
            policy.stored = {name: StoredWeights.of(folder / name, made) for name, made in policy.denoisers.items()}
        return policy

    @classmethod
    def read_adapter(cls, path: str) -> Any:
        """Read adapters of the denoisers, in peft's form or any that the pipeline's own loader knows."""
        from models.weights.lora_start import pipeline_adapter

        return pipeline_adapter(path, cls.pipeline_name, cls.denoiser_names)

    def cut_notes(self, prompts: Sequence[str]) -> list[str]:
        """Return a sentence for each tokenizer that cuts some of the prompts off."""
        found = {reader.tokenizer: getattr(self.pipeline, reader.tokenizer, None) for reader in self.readers}
        return list(cut_notes(self.readers, found, self.options, prompts))

    @property
    def denoisers(self) -> dict[str, Any]:
        """The denoisers the folder has."""
        found = {name: getattr(self.pipeline, name, None) for name in self.denoiser_names}
        return {name: module for name, module in found.items() if module is not None}

    def sigmas(self, steps: int) -> Tensor:
        """Return 1, (T-1)/T, ..., 1/T, 0 after the scheduler's shift, as the pipeline sets them."""
        scheduler = self.pipeline.scheduler
        dynamic = {"mu": self.shift_mu(steps)} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=self.settings.device, **dynamic)
        return scheduler.sigmas.clone().float()  # type: ignore[no-any-return]

    def shift_mu(self, steps: int) -> float:
        """Return the dynamic shift for the size of the image."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.pipeline.scheduler.config
        bounds = {
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
            "base_shift": 0.5,
            "max_shift": self.max_shift,
        }
        return float(calculate_shift(self.image_tokens(), *(config.get(name, value) for name, value in bounds.items())))

    def image_tokens(self) -> int:
        """Return the number of latent tokens of an image."""
        unit = self.pipeline.vae_scale_factor * 2
        return int((self.settings.height // unit) * (self.settings.width // unit))

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

        When gradients are wanted of the conditional half only, the negative half is a forward of its own without any:
        Flow-GRPO runs both with gradient and detaches one, which gives the same gradient at more cost. Where it is
        known already there is none.
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
        """Write the LoRA file the pipeline's ``load_lora_weights`` reads, with the adapter's settings as metadata."""
        ((name, module),) = self.denoisers.items()
        save_lora(self.pipeline_name, folder, name, module)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments for size, steps, guidance and length of text."""
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
        return PipelineCall(arguments=arguments, vae_tiling=settings.vae_tiling)

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return text components the folder lacks although the pipeline's class has no default for them."""
        index = read_index(folder, cls.pipeline_name, cls.family, others=cls.folders_of)
        optional = diffusers_class(cls.pipeline_name)._optional_components
        absent = (name for name in cls.text_parts if not index.get(name, [None])[0])
        return tuple(name for name in absent if name not in optional)

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check that a folder is of this family and its size, and all of it is read; return its index."""
        index = read_index(folder, cls.pipeline_name, cls.family, others=cls.folders_of)
        with whole(folder):
            check_variants(folder, [name for name in index if name not in cls.unused_parts])
            cls.check_size(folder, settings)
            cls._check_scheduler(folder, index)
            check_index(folder, cls.family, index, cls.pipeline_name, cls.settings_read)
        return index

    @classmethod
    def check_options(cls, folder: Path, options: Any) -> None:
        """Check that options of the family can be had of a folder, which ``check_folder`` found in order.

        Raises:
            ConfigError: one cannot.
        """

    @classmethod
    def check_size(cls, folder: Path | None, settings: DiffusionSettings, *, unit: int | None = None) -> None:
        """Check that the model can make images of this size: one of ``unit``, or of what its files or the family say.

        Raises:
            ConfigError: it cannot; the message names the nearest sizes.
        """
        unit = unit or (cls.size_unit if folder is None else cls.unit_of(folder))
        for name in ("height", "width"):
            size = getattr(settings, name)
            if size % unit or size < unit:
                below = max(unit, size // unit * unit)
                raise ConfigError(
                    f"model.{name} is {size}, but this model takes multiples of {unit}. "
                    f"The nearest are {below} and {below + unit}."
                )
        if settings.frames != 1:
            raise ConfigError(f"model.frames is {settings.frames}, but '{cls.family}' makes images. Set it to 1.")

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return components the pipeline's own loader cannot load."""
        return {}

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        """Return what height and width must be multiples of."""
        return cls.size_unit

    def modules(self) -> dict[str, nn.Module]:
        """Return text encoders, denoisers and autoencoder, as far as they are loaded."""
        found = {name: getattr(self.pipeline, name, None) for name in (*self.text_parts, *self.denoiser_names, "vae")}
        return {name: module for name, module in found.items() if isinstance(module, nn.Module)}

    def _predict(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        dtype = self.settings.dtype
        # Trained weights are float32 whatever the forward's dtype; autocast brings the two together.
        autocast = torch.autocast(latents.device.type, dtype, enabled=dtype != torch.float32)
        with autocast:
            return self.call(modules, latents.to(dtype), sigma, rows)

    def prepare(self, module: Any) -> None:
        """Set a denoiser up as the settings say: what it keeps for the backward pass, its attention, compilation."""
        if self.settings.gradient_checkpointing:
            module.enable_gradient_checkpointing()
        if self.settings.attention is not None:
            set_attention(module, self.settings.attention)
        if self.settings.compile:
            compile_blocks(module, self.blocks)

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        check_scheduler(folder, cls.family, index, cls.schedulers)
