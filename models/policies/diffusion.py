"""What a diffusion or flow-matching family must provide. There is no sampling loop here: see ``models.maths.sampling``.

Legend: B rows, ... latent dims, H W image pixels, T steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from configs.errors import ConfigError
from configs.schema import RunConfig
from models.maths.conditioning import Conditioning, Guided
from models.policies.base import Policy, PolicySettings
from models.policies.parts import Part
from models.policies.trainable import Trainable
from models.weights.lora import LoraSpec

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSettings(PolicySettings):
    """How a denoiser is called."""

    height: int
    """Image height in pixels."""
    width: int
    """Image width in pixels."""
    frames: int = 1
    """Frames of a clip; 1 for images."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 is off."""
    train_negative: bool = False
    """With guidance, differentiate the negative prediction too."""
    vae_tiling: bool = False
    """Decode in overlapping tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """The scheduler a pipeline needs to walk a policy's noise levels, where its own is another."""

    name: str
    """Class in diffusers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options; plain JSON values."""
    from_config: bool = False
    """Made from the config of the pipeline's own scheduler, changed by the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """How the plain diffusers pipeline is called to draw what a policy draws."""

    arguments: Mapping[str, Any]
    """Arguments besides prompt, image and generator; plain JSON values."""
    scheduler: SchedulerChoice | None = None
    """Scheduler to set first; None: the pipeline's own."""
    guider: Mapping[str, float] | None = None
    """Options of the classifier-free guider to set first, of pipelines that take no guidance as an argument."""
    blocks: str | None = None
    """Class of the blocks that a modular pipeline is made of; None of a classic one."""
    left_out: tuple[str, ...] = ()
    """Of these the ones that are left out."""
    workflow: str | None = None
    """The task whose blocks are taken, of blocks for several."""
    loads_adapters: bool = True
    """The pipeline has ``load_lora_weights``; else the components that LoRA files are for load them."""
    image_size: tuple[int, int] | None = None
    """Width and height that the image to start from is scaled to first; None: the pipeline scales it as the policy."""
    image_area: int | None = None
    """Pixels that larger images to start from are scaled down to first, in their own shape; None: as they are."""
    clip: int = 0
    """What it starts from is a clip of so many frames, its argument ``video``; 0: an image, or nothing."""
    last_frame: bool = False
    """A second image to start from is the clip's last frame, its argument ``last_image``."""
    vae_tiling: bool = False
    """Its autoencoder decodes in overlapping tiles."""
    heard: bool = False
    """What it makes has sound."""
    differences: tuple[str, ...] = ()
    """What the pipeline cannot be told, a sentence each."""


#: Of each prompt the images it starts from, (H, W, 3) uint8 of any size each; or clips, (F, H, W, 3).
Images = Sequence[Sequence[np.ndarray]]


class DiffusionPolicy(Policy):
    """One family of denoisers: encode prompts, start from noise, give velocities, decode."""

    settings: DiffusionSettings
    starts_from_clips: ClassVar[bool] = False
    """What prompts come with are clips; such a family is one of ``CLIP_CONDITIONED``."""
    modality_names: ClassVar[tuple[str, ...]] = ()
    """The keys of ``modalities``; such a family is one of ``MODALITIES``."""

    @classmethod
    def settings_for(
        cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool
    ) -> DiffusionSettings:
        """Return size, guidance and how the pipeline is loaded."""
        section = config.model
        return DiffusionSettings(
            height=section.height,
            width=section.width,
            guidance_scale=section.guidance_scale,
            dtype=dtype,
            device=device,
            train_negative=config.optimize.guidance_gradient == "both",
            gradient_checkpointing=section.gradient_checkpointing,
            frames=section.frames,
            attention=section.attention,
            device_map=section.device_map,
            compile=section.compile,
            vae_tiling=section.vae_tiling,
            empty=empty,
        )

    @contextmanager
    def sized(self, *, height: int, width: int, frames: int) -> Iterator[None]:
        """Make images or clips of another size: what depends on it is computed anew for every call."""
        before = self.settings
        self.settings = replace(before, height=height, width=width, frames=frames)
        try:
            yield
        finally:
            self.settings = before

    @classmethod
    def trained_parts(cls, config: RunConfig) -> frozenset[Part]:
        """The denoisers, and the autoencoder where samples are decoded."""
        return frozenset({Part.DENOISER, Part.VAE} if config.rollout.media.decodes else {Part.DENOISER})

    def trainable(self, lora: LoraSpec | None, *, seed: int) -> TrainableDenoiser:
        """Make the denoisers trainable, with adapters or whole."""
        return TrainableDenoiser(self, lora, seed=seed)

    @property
    @abstractmethod
    def denoisers(self) -> dict[str, Any]:
        """Trainable modules by the name they have in the pipeline."""

    @property
    def trained(self) -> dict[str, Any]:
        """The denoisers."""
        return self.denoisers

    @abstractmethod
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return one row of every conditioning tensor per prompt; rows do not depend on their neighbors.

        Args:
            prompts: B prompts.
            images: of B prompts the images to start from, for families that take them; one of each where a family
                has no option ``references``.
        """

    def first_mark(self, text: str) -> str | None:
        """Return a control token of one of the tokenizers that stands in a text; None: there is none."""
        return None

    def as_plain(self, text: str) -> str:
        """Return a text in which no control token of a tokenizer stands; see ``models.text.control_tokens``."""
        return text

    def cut_notes(self, prompts: Sequence[str]) -> list[str]:
        """Return what a person should know of prompts that are longer than what is read of them, a sentence each."""
        return []

    @abstractmethod
    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, ...) float32 noise, one row per generator: latents at the first of ``sigmas``."""

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
            sigma: (B,) float32, each row its own.
            conditioning: B rows.
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
        """Samples per second of the sound that clips have; None of families without."""
        return None

    def sounds(self, latents: Tensor) -> Tensor:
        """Return (B, N, C) int16 sound of (B, ...) final latents, of one channel or two.

        Raises:
            TypeError: the family has none.
        """
        raise TypeError(f"{type(self).__name__} makes no sound")

    def modalities(self) -> Mapping[str, int]:
        """Return the modalities of a sample, in order, and how much of the first latent dimension each takes.

        Nothing of families whose samples are one thing, however many arrays they are shown as.
        """
        return {}

    def apart(self, latents: Tensor) -> tuple[Tensor, ...]:
        """Return what of (B, ...) latents, or of anything shaped like them, belongs to each modality, in order."""
        return torch.split(latents, list(self.modalities().values()), dim=1)

    def started(self, noise: Tensor, sigmas: Tensor, conditioning: Conditioning) -> Tensor:
        """Return what chains start from: noise, or what a prompt comes with under noise.

        Args:
            noise: (B, ...) float32.
            sigmas: (T + 1,) levels of the chain.
            conditioning: B rows, what the model is called with.
        """
        return noise

    def finished(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Return what is decoded of the final latents of a chain: these, and what beside them does not move.

        Args:
            latents: (B, ...) at the end of a chain.
            conditioning: B rows, what the model was called with.
        """
        return latents

    def clean_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, ...) clean latents, at level 0, that the final latents of a chain are decoded as.

        They are these, but for families whose chains end above level 0.
        """
        return latents

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return (B, 3, H, W) float32 images, or (B, F, 3, H, W) clips, through which a reward's gradient passes.

        ``latents`` are (B, ...) clean ones, at level 0: a prediction of x0, or ``clean_latents`` of a chain's end.
        Values are about 0 to 1. They are neither rounded nor cut to that range: a pixel that was cut has no gradient.

        Raises:
            ConfigError: the family has no such decoder.
        """
        raise ConfigError(
            f"model.policy: {type(self).__name__} has no method 'decode_smoothly', through which gradients of rewards "
            "reach latents. Write one, or choose an optimize.algorithm that needs no gradients."
        )

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall | None:
        """Return how the plain pipeline draws what this policy draws with the ODE; None where there is no such call.

        Args:
            steps: denoising steps.
            negative_prompt: negative prompt of guidance by two forwards; None where there is none.
        """
        return None

    @classmethod
    def complete(cls, folder: Path) -> None:
        """Write stand-ins of components that ``from_pretrained`` demands and an exported pipeline folder lacks."""

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return the components ``from_pretrained`` must be told that a pipeline folder lacks."""
        return ()


class TrainableDenoiser(Trainable):
    """A trained diffusion policy, with the velocities of what it is compared with."""

    policy: DiffusionPolicy

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the policy's (B, ...) velocity, see ``DiffusionPolicy.velocity``."""
        return self.policy.velocity(latents, sigma, conditioning)

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return the policy's velocities and predictions for the negative prompt, see the policy's method."""
        return self.policy.guided_velocity(latents, sigma, conditioning)

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the base model's (B, ...) velocity: LoRA switched off, or the frozen copy.

        Raises:
            RuntimeError: full weights are trained and no reference was set.
        """
        reference = self.frozen["reference"]
        if self.lora is not None:
            with self.without_adapters():
                return self.policy.velocity(latents, sigma, conditioning)
        if not reference:
            raise RuntimeError("set_reference() must be called before reference velocities are asked for")
        return self.policy.velocity(latents, sigma, conditioning, reference)

    @torch.no_grad()
    def teacher_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, name: str = "") -> Tensor:
        """Return a teacher's (B, ...) velocity.

        Raises:
            RuntimeError: no teacher of this name was set.
        """
        teacher = self._teachers.get(name)
        if teacher is None:
            raise RuntimeError("set_teacher() must be called before teacher velocities are asked for")
        return self.policy.velocity(latents, sigma, conditioning, teacher)
