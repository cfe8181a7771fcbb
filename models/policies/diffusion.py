"""The interface of diffusion and flow-matching families. The sampling loop is in ``flowmill.models.maths.sampling``.
Legend: B rows, ... latent dims, H W image pixels, T steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning, Guided
from flowmill.models.policies.base import Policy, PolicySettings, common_settings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.lora import LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSettings(PolicySettings):
    """Settings for calling a denoiser."""

    height: int
    """Image height in pixels."""
    width: int
    """Image width in pixels."""
    frames: int = 1
    """Frames of a clip; 1 for images."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 is off."""
    train_negative: bool = False
    """With guidance, also differentiate the negative prediction."""
    vae_tiling: bool = False
    """Decode in overlapping tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundForm:
    """The sound of a clip as its autoencoder reads it."""

    rate: int
    """Samples per second."""
    channels: int
    """1 or 2."""
    length: int
    """Samples of a whole clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """The scheduler a pipeline needs to follow a policy's noise levels, if it differs from the pipeline's own."""

    name: str
    """Class in diffusers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options; plain JSON values."""
    from_config: bool = False
    """Create it from the config of the pipeline's own scheduler, changed by the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The call of the plain diffusers pipeline that draws the same samples as a policy."""

    arguments: Mapping[str, Any]
    """Arguments besides prompt, image and generator; plain JSON values."""
    scheduler: SchedulerChoice | None = None
    """Scheduler to set first; None: the pipeline's own."""
    guider: Mapping[str, float] | None = None
    """Options of the classifier-free guider to set first, for pipelines without a guidance argument."""
    blocks: str | None = None
    """Class of the blocks of a modular pipeline; None for a classic one."""
    left_out: tuple[str, ...] = ()
    loads_adapters: bool = True
    """True if the pipeline has ``load_lora_weights``; otherwise the adapted components load LoRA files."""
    image_size: tuple[int, int] | None = None
    """Width and height to scale the start image to first; None: the pipeline scales it as the policy does."""
    image_area: int | None = None
    """Pixels to scale larger start images down to first, keeping the aspect ratio; None: no scaling."""
    clip: int = 0
    """Frames of the start clip, its argument ``video``; 0: it starts from an image or from noise alone."""
    last_frame: bool = False
    """A second start image is the clip's last frame, its argument ``last_image``."""
    vae_tiling: bool = False
    heard: bool = False
    """Its output has sound."""
    differences: tuple[str, ...] = ()
    """Settings that cannot be passed to the pipeline, one sentence each."""


#: The start images of each prompt, each (H, W, 3) uint8 of any size; or clips, (F, H, W, 3).
Images = Sequence[Sequence[np.ndarray]]


class DiffusionPolicy(Policy):
    """One family of denoisers: encodes prompts, draws initial noise, predicts velocities, decodes."""

    settings: DiffusionSettings
    starts_from_clips: ClassVar[bool] = False
    """Prompts come with clips, as ``FamilySpec.starts_from`` says."""

    @classmethod
    def settings_for(
        cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool
    ) -> DiffusionSettings:
        section = config.model
        return DiffusionSettings(
            **common_settings(config, dtype=dtype, device=device, empty=empty),
            height=section.height,
            width=section.width,
            frames=section.frames,
            guidance_scale=section.guidance_scale,
            train_negative=config.optimize.guidance_gradient == "both",
            compile=section.compile,
            vae_tiling=section.vae_tiling,
        )

    @contextmanager
    def sized(self, *, height: int, width: int, frames: int) -> Iterator[None]:
        """Make images or clips of another size inside the context; every call recomputes values that depend on it."""
        before = self.settings
        self.settings = replace(before, height=height, width=width, frames=frames)
        try:
            yield
        finally:
            self.settings = before

    @classmethod
    def trained_parts(cls, config: RunConfig) -> frozenset[Part]:
        return frozenset({Part.DENOISER, Part.VAE} if config.rollout.media.decodes else {Part.DENOISER})

    def trainable(self, lora: LoraSpec | None, *, seed: int) -> TrainableDenoiser:
        return TrainableDenoiser(self, lora, seed=seed)

    @property
    @abstractmethod
    def denoisers(self) -> dict[str, Any]:
        """Trainable modules by their names in the pipeline."""

    @property
    def trained(self) -> dict[str, Any]:
        return self.denoisers

    @abstractmethod
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return one row of every conditioning tensor per prompt; rows do not depend on their neighbors. ``images``:
        start images of the B prompts, for families that take them; one per prompt if the family has no option
        ``references``."""

    def first_mark(self, text: str) -> str | None:
        """Return the first control token of a tokenizer in a text, or None."""
        return None

    def as_plain(self, text: str) -> str:
        """Return a text without control tokens of the tokenizers; see ``flowmill.models.text.control_tokens``."""
        return text

    def cut_notes(self, prompts: Sequence[str]) -> list[str]:
        """Return notes for the user on truncated prompts, one sentence each."""
        return []

    @abstractmethod
    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, ...) float32 noise, one row per generator: latents at the first sigma."""

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """Return the (T + 1,) float32 noise levels from about 1 to 0."""

    @abstractmethod
    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        denoisers: Mapping[str, nn.Module] | None = None,
    ) -> Tensor:
        """Return (B, ...) float32 velocities with guidance applied.

        Args:
            latents: (B, ...) float32.
            sigma: (B,) float32, one per row.
            denoisers: modules to call instead of the policy's own (a reference, an average, a wrapper).
        """

    @abstractmethod
    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return (B, ...) velocities, and the predictions for the negative prompt they are guided away from."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return (B, H, W, 3) uint8 images, or (B, F, H, W, 3) clips, of (B, ...) final latents."""

    @property
    def sound_rate(self) -> int | None:
        """Sample rate of the clips' sound; None for families without sound."""
        return None

    def sounds(self, latents: Tensor) -> Tensor:
        """Return (B, N, C) int16 sound of (B, ...) final latents, with one or two channels; raise TypeError if the
        family has no sound."""
        raise TypeError(f"{type(self).__name__} makes no sound")

    def started(self, noise: Tensor, sigmas: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the latents that chains start from: noise, or a prompt's clip with noise added. ``noise``: (B, ...)
        float32; ``sigmas``: (T + 1,) levels of the chain."""
        return noise

    def finished(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the latents to decode: the final latents of a chain, with the fixed parts of the sample inserted.
        ``latents``: (B, ...) at the end of a chain."""
        return latents

    def clean_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, ...) clean latents, at level 0, of the final latents of a chain. They are equal, except for
        families whose chains end above level 0."""
        return latents

    def encode_media(self, media: Tensor) -> Tensor:
        """Return the (B, ...) float32 clean latents of images or clips, the most likely ones.

        ``decode`` of them gives the media back, as closely as the autoencoder can. Of samples with sound these are the
        latents of the clip, which those of ``encode_sounds`` follow along the first latent dimension.

        Args:
            media: (B, 3, H, W) or (B, 3, F, H, W) float32 in [-1, 1], of the size in ``settings``.
        """
        raise ConfigError(
            f"model.policy: {type(self).__name__} has no method 'encode_media', so it cannot be trained on given "
            "images or clips. Implement it, or choose another family."
        )

    @property
    def sound_form(self) -> SoundForm | None:
        """Form of sounds for ``encode_sounds``; None for families without sound. Raises ConfigError if the family has
        sound and no encoder."""
        if self.sound_rate is None:
            return None
        raise ConfigError(
            f"model.policy: {type(self).__name__} has no property 'sound_form' and no method 'encode_sounds', so it "
            "cannot be trained on given clips with sound. Implement them, or choose another family."
        )

    def encode_sounds(self, sounds: Tensor) -> Tensor:
        """Return the float32 clean latents of sounds, the most likely ones; see ``encode_media``. Raises
        TypeError if the family has no sound. ``sounds``: (B, C, N) float32 in [-1, 1], as ``sound_form`` says."""
        raise TypeError(f"{type(self).__name__} encodes no sound")

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return (B, 3, H, W) float32 images, or (B, F, 3, H, W) clips, differentiable for reward gradients.

        ``latents`` are (B, ...) clean ones, at level 0: a prediction of x0, or ``clean_latents`` of a chain's end.
        Values are about 0 to 1, neither rounded nor clamped: a clamped pixel has no gradient. Raises ConfigError if the
        family has no such decoder.
        """
        raise ConfigError(
            f"model.policy: {type(self).__name__} has no method 'decode_smoothly', through which gradients of rewards "
            "reach latents. Implement it, or choose an optimize.algorithm that needs no gradients."
        )

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall | None:
        """Return the plain pipeline's call that draws the same samples as this policy with the ODE; None if none does.
        ``negative_prompt``: negative prompt of guidance by two forwards, or None."""
        return None

    @classmethod
    def complete(cls, folder: Path) -> None:
        """Write stand-ins for components that ``from_pretrained`` requires and an exported pipeline folder lacks."""

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return the missing components of a pipeline folder that ``from_pretrained`` must receive as None."""
        return ()


class TrainableDenoiser(Trainable):
    """A trained diffusion policy, and the velocities of its reference and teachers."""

    policy: DiffusionPolicy

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the policy's (B, ...) velocity, see ``DiffusionPolicy.velocity``."""
        return self.policy.velocity(latents, sigma, conditioning)

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return the policy's velocities and predictions for the negative prompt, see the policy's method."""
        return self.policy.guided_velocity(latents, sigma, conditioning)

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the reference's (B, ...) velocity: its adapters or none, or the frozen copy. Raises RuntimeError if
        full weights are trained and no reference was set."""
        reference = self.frozen["reference"]
        if self.lora is not None:
            with self.reference_adapters():
                return self.policy.velocity(latents, sigma, conditioning)
        if not reference:
            raise RuntimeError("set_reference() must be called before reference_velocity()")
        return self.policy.velocity(latents, sigma, conditioning, reference)

    @torch.no_grad()
    def teacher_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, name: str = "") -> Tensor:
        """Return a teacher's (B, ...) velocity; raise RuntimeError if no teacher of this name was set."""
        teacher = self._teachers.get(name)
        if teacher is None:
            raise RuntimeError("set_teacher() must be called before teacher_velocity()")
        return self.policy.velocity(latents, sigma, conditioning, teacher)
