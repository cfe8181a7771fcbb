"""Memory of batches of a denoiser and its autoencoder, traced with the code of their family.

A tiny pipeline of the family encodes a prompt; its parts are then replaced by those of the model, without weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flowmill.configs.model_families import most_images, spec_of
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.memory.architectures import meta_decoder, meta_denoiser
from flowmill.models.memory.published import Architecture
from flowmill.models.memory.tracing import Blocks, PeakMemory, Traced, Tracer, fake_module, kinds, make_fake
from flowmill.models.policies import POLICIES
from flowmill.models.policies.attention_masks import with_content
from flowmill.models.policies.decoding import recompute_decoder
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.weights.lora import LoraSpec, targeted
from flowmill.models.weights.stored_weights import empty_model

#: Any prompt; the shapes of conditioning do not depend on it.
_PROMPT = "a photo"
#: Height and width that every family's small pipeline can make.
_SMALL = 64
#: Tiles overlap by a quarter on either side.
_OVERLAP = (4 / 3) ** 2
_CPU = torch.device("cpu")


#: Models with their tiny pipelines.
_MODELS: dict[str, DenoiserMemory] = {}


def measured_denoiser(
    config: RunConfig, architecture: Architecture, lora: LoraSpec | None, *, guided: bool
) -> DenoiserMemory:
    """Return the measures of a model, the same object for equal arguments; see ``DenoiserMemory``."""
    section = config.model.model_copy(update={"quantize": None})
    key = repr((section, architecture, lora, guided, config.optimize.guidance_gradient))
    if key not in _MODELS:
        _MODELS[key] = DenoiserMemory(config, architecture, lora, guided=guided, key=key)
    return _MODELS[key]


class DenoiserMemory:
    """Measures the model of one architecture, its activations only: those of quantized models are the same."""

    def __init__(
        self, config: RunConfig, architecture: Architecture, lora: LoraSpec | None, *, guided: bool, key: str
    ) -> None:
        """Bind to a model.

        Args:
            config: a config of such a model.
            architecture: the model.
            lora: adapters; None: all weights are trained.
            guided: guidance by two predictions is on.
            key: everything that results depend on.
        """
        self.architecture, self._lora, self._guided = architecture, lora, guided
        self.policy, (self._latents, self._conditioning) = _pipeline(config, architecture)
        self.tracer = Tracer(
            label=architecture.denoiser,
            key=key,
            build=self._built,
            groups=kinds(meta_denoiser(architecture), self.policy.blocks),
            layouts=self.policy.asks_layout,
        )
        self._decoder = Tracer(label=str(architecture.vae["class"]), key=key, build=lambda _, fakes: self._fake(fakes))

    def sampling(self, rows: int = 1) -> int:
        """Return the bytes of a forward of some rows without gradient, without weights."""
        return self.tracer(sample, rows).peak

    def training(self, rows: int = 1) -> Traced:
        """Return the bytes of a forward and backward of some rows, and those kept between the two."""
        return self.tracer(train, rows, gradient=True)

    def decoding(self, rows: int = 1) -> int:
        """Return the bytes of decoding the final latents of some rows, without the autoencoder's weights."""
        return self._decoder(self._decode, rows).peak

    def following(self, rows: int = 1) -> int:
        """Return the bytes of decoding the final latents of some rows and of the backward pass to them."""
        # All tiles keep their activations at once, so tiles need the memory of the whole image, times their overlap.
        overlap = _OVERLAP if self.policy.settings.vae_tiling else 1
        return int(self._decoder(self._follow, rows, gradient=True).peak * overlap)

    def stored(self) -> int:
        """Return the bytes of a training row: latents before and after a step, and conditioning."""
        conditioning = sum(row.nbytes for row in self._conditioning.values())
        return 2 * self._latents.nbytes + (2 if self._guided else 1) * conditioning

    def _decode(self, vae: Any, memory: PeakMemory, rows: int) -> None:
        if self.policy.settings.vae_tiling:
            vae.enable_tiling()
        decoded = self.policy.run_decoder(vae, torch.empty(self._final(vae, rows)))
        (decoded / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)

    def _follow(self, vae: Any, memory: PeakMemory, rows: int) -> None:
        if self.policy.settings.gradient_checkpointing:
            recompute_decoder(vae)
        decoded = self.policy.run_decoder(vae, torch.empty(self._final(vae, rows)).requires_grad_())
        (decoded / 2 + 0.5).square().mean().backward()  # type: ignore[no-untyped-call]

    def _fake(self, fakes: FakeTensorMode) -> nn.Module:
        return fake_module(meta_decoder(self.architecture).requires_grad_(False).eval(), fakes)

    def _final(self, vae: Any, rows: int) -> tuple[int, ...]:
        settings, (channels, pixels, _) = self.policy.settings, self.architecture.latents
        clips = any(name in vae.config for name in ("z_dim", "temporal_compression_ratio", "clip_length"))
        frames = (self.architecture.latent_frames(settings.frames),) if clips else ()
        return (rows, channels, *frames, settings.height // pixels, settings.width // pixels)

    def shortened(self, chosen: Blocks) -> nn.Module:
        """Return the denoiser with some of its blocks, on the meta device."""
        module = empty_model(lambda: meta_denoiser(self.architecture), self.policy.settings.dtype)
        module.requires_grad_(False)
        for name in self.policy.blocks:
            blocks = getattr(module, name, None)
            if isinstance(blocks, nn.ModuleList):
                some = (block for place, block in enumerate(blocks) if (name, place) in chosen)
                setattr(module, name, nn.ModuleList(some))
        return module

    def adapters(self) -> LoraSpec | None:
        """Return the adapters with targets limited to layers in the policy's blocks."""
        if self._lora is None:
            return None
        names = [name for module in self.policy.denoisers.values() for name, _ in module.named_modules()]
        return replace(self._lora, targets=tuple(t for t in self._lora.targets if any(targeted(n, [t]) for n in names)))

    def _built(self, chosen: Blocks, fakes: FakeTensorMode) -> DenoiserMemory:
        """Set denoisers with some of the blocks in the policy."""
        # Allocations of another measurement must not count here.
        self.policy.forget_tables()
        for name in self.policy.denoisers:
            setattr(self.policy.pipeline, name, self.shortened(chosen))
        for module in self.policy.denoisers.values():
            self.policy.prepare(module)
        lora = self.adapters()
        if lora is None or lora.targets:
            with torch.device("meta"):
                # Drawing the initial weights of adapters costs nothing there.
                make_fake(self.policy.trainable(lora, seed=0), fakes)
        else:
            for module in self.policy.denoisers.values():
                fake_module(module, fakes)
        return self

    def inputs(self, rows: int, device: torch.device = _CPU) -> tuple[Tensor, Tensor, Conditioning]:
        """Return latents, noise levels and conditioning of some rows; random, or fake in a trace."""
        positive, negative = (
            {name: _rows(row, rows, device) for name, row in self._conditioning.items()} for _ in range(2)
        )
        conditioning = Conditioning(positive, negative if self._guided else None)
        return _rows(self._latents, rows, device), torch.tensor([0.5] * rows, device=device), conditioning


def sample(model: DenoiserMemory, memory: PeakMemory, rows: int) -> None:
    """Carry out a forward."""
    model.policy.velocity(*model.inputs(rows))


def train(model: DenoiserMemory, memory: PeakMemory, rows: int) -> None:
    """Carry out a forward and backward; gradients go through blocks without adapters too."""
    latents, sigma, conditioning = model.inputs(rows)
    velocity = model.policy.velocity(latents.requires_grad_(), sigma, conditioning)
    memory.retained = memory.now
    velocity.square().mean().backward()  # type: ignore[no-untyped-call]


def _pipeline(
    config: RunConfig, architecture: Architecture
) -> tuple[PipelinePolicy, tuple[Tensor, Mapping[str, Tensor]]]:
    """Return a pipeline of the family with the sizes of the model, and (1, ...) latents and conditioning of a row."""
    # Imports diffusers and transformers.
    from flowmill.models.quickstart.tiny import build_tiny

    section, family = config.model, resolve(POLICIES, config.model.policy, label="model.policy")
    plain = config.model_copy(update={"model": section.model_copy(update={"quantize": None, "attention": None})})
    settings = family.settings_for(plain, dtype=getattr(torch, section.dtype), device=_CPU, empty=False)
    settings = replace(settings, compile=False)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(section.policy).save_pretrained(folder)
        small = replace(settings, height=_SMALL, width=_SMALL)
        policy = family.load(Path(folder), small, frozenset(Part), section.options)
    # The small model does not support all sizes of the real one, so they are set after loading.
    policy.settings = settings
    most = most_images(section.policy, section.options)
    # The number of input frames of a clip has a negligible effect on memory.
    image = np.zeros((section.height, section.width, 3), np.uint8)
    images = [[image] * (1 if spec_of(section.policy).last_frame else most)] if most else None
    denoiser: Any = next(iter(policy.denoisers.values()))
    large: Any = meta_denoiser(architecture)
    with torch.no_grad():
        rows = policy.encode([_PROMPT], images)
    wider = as_wide(rows, denoiser.config, large.config, settings.dtype)
    # Sizes are those of the large model.
    policy.scale_of(architecture.latents[1])
    for name in policy.denoisers:
        # The number of latent channels is in its config.
        setattr(policy.pipeline, name, large)
    return policy, (policy.initial_latents([torch.Generator().manual_seed(0)]), wider)


def _rows(row: Tensor, rows: int, device: torch.device) -> Tensor:
    """Return copies of a (1, ...) row; integers, such as lengths, keep their content."""
    if row.is_floating_point():
        return torch.randn((rows, *row.shape[1:]), dtype=row.dtype, device=device)
    copies = torch.tensor(row.tolist() * rows, device=device)
    if row.ndim == 1 and isinstance(copies, FakeTensor):
        # The mode itself keeps the content of single numbers only; models that compute row by row read each.
        with with_content():
            copies.constant = row.repeat(rows)
    return copies


#: Names of conditioning widths in denoisers' configs.
_SEQUENCES = (
    *("joint_attention_dim", "text_dim", "cap_feat_dim", "caption_channels", "cross_attention_dim", "image_dim"),
    *("text_embed_dim", "text_embed_2_dim", "context_in_dim", "image_embed_dim"),
)


def as_wide(
    rows: Mapping[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return rows of a small model's conditioning in the shapes of a large one, in the storage dtype.

    Args:
        rows: (1, ...) each, of a short prompt.
        small: config of the small denoiser.
        large: config of the large one.
        dtype: dtype of the model.
    """
    wider = {name: _as_for(name, row, small, large, dtype) for name, row in rows.items()}
    if "text_length" in wider:
        # Texts of variable length count with the maximum length.
        wider["text_length"] = torch.full_like(wider["text_length"], wider["prompt_embeds"].shape[1])
    return wider


def _as_for(name: str, row: Tensor, small: Mapping[str, Any], large: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return a row of a small model's conditioning with the width of a large one, in the storage dtype."""
    if not row.is_floating_point():
        return row
    if "latents" in name:
        # Tokens of source images have the width of generated ones.
        width = large["in_channels"] if row.shape[-1] == small.get("in_channels") else row.shape[-1]
        return torch.empty((*row.shape[:-1], width), dtype=dtype)
    widths_of = _vectors if row.ndim == 2 else _sequences
    widths = [
        there for here, there in zip(widths_of(small), widths_of(large), strict=True) if here == row.shape[-1] and there
    ]
    return torch.empty((*row.shape[:-1], widths[0] if widths else row.shape[-1]), dtype=dtype)


def _sequences(config: Mapping[str, Any]) -> list[int | None]:
    return [config.get(key) for key in _SEQUENCES]


def _vectors(config: Mapping[str, Any]) -> list[int | None]:
    # SDXL appends the embeddings of six numbers to its pooled text.
    joined, each = config.get("projection_class_embeddings_input_dim"), config.get("addition_time_embed_dim")
    return [config.get("pooled_projection_dim"), joined - 6 * each if joined and each else None]
