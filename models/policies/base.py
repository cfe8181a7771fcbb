"""What a model family must provide. There is no sampling loop here: see ``models.sampling``.

Legend: B rows, ... latent dims, H W image pixels, T steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from models.meter import Meter
    from models.stored_weights import StoredWeights


class Part(Enum):
    """What of a pipeline is loaded; text encoders and VAE are large and needed by few stages."""

    TEXT = "text"
    DENOISER = "denoiser"
    VAE = "vae"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How a policy is called."""

    height: int
    """Image height in pixels."""
    width: int
    """Image width in pixels."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 is off."""
    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    """Dtype of weights and forward pass."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of all tensors."""
    train_negative: bool = False
    """With guidance, differentiate the negative prediction too."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    frames: int = 1
    """Frames of a clip; 1 for images."""
    attention: str | None = None
    """Attention backend of diffusers, None for its default."""
    device_map: str | None = None
    """How the pipeline's parts are placed over devices; None: all on ``device``."""
    compile: bool = False
    """Compile the denoiser's repeated blocks."""
    vae_tiling: bool = False
    """Decode in overlapping tiles."""
    empty: bool = False
    """Make denoisers without weights, on the meta device: who spreads them over ranks then reads each rank's part."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Batch-first conditioning: every tensor has the sample on dim 0, so rows can be picked, joined and repeated."""

    positive: Mapping[str, Tensor]
    """What the family's denoiser is called with."""
    negative: Mapping[str, Tensor] | None = None
    """The same for the negative prompt, with guidance."""
    unconditional: Tensor | None = None
    """(B, ...) predictions for the negative prompt that are known already, of the very latents asked about."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        """Return the conditioning with a function applied to every tensor."""
        negative = None if self.negative is None else {k: function(v) for k, v in self.negative.items()}
        known = None if self.unconditional is None else function(self.unconditional)
        return Conditioning({k: function(v) for k, v in self.positive.items()}, negative, known)

    def rows(self, index: Tensor) -> Conditioning:
        """Return the rows at (B,) indices."""
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device) -> Conditioning:
        """Return it on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.positive.values())))


class Guided(NamedTuple):
    """What guidance makes of two predictions, and the one for the negative prompt."""

    velocity: Tensor
    """(B, ...) float32."""
    unconditional: Tensor | None
    """(B, ...) float32; None without guidance by two forwards."""


class GivesVelocity(Protocol):
    """What sampling asks of a model."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, ...) float32 velocities, see ``Policy.velocity``."""

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return the same and what they are made of; asked only where that is stored."""


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
    image_size: tuple[int, int] | None = None
    """Width and height that the image to start from is scaled to first; None: the pipeline scales it as the policy."""
    vae_tiling: bool = False
    """Its autoencoder decodes in overlapping tiles."""
    differences: tuple[str, ...] = ()
    """What the pipeline cannot be told, a sentence each."""


class Policy(ABC):
    """One model family: encode prompts, start from noise, give velocities, decode."""

    blocks: ClassVar[tuple[str, ...]]
    """Attribute names of the denoiser's block lists, for sharding, compiling and checkpointing."""
    encoding_parts: ClassVar[frozenset[Part]] = frozenset({Part.TEXT})
    """What ``encode`` needs."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Published LoRA targets of the family; each must match at least one module."""

    def __init__(self, settings: PolicySettings) -> None:
        """Keep the settings."""
        self.settings = settings
        self.stored: dict[str, StoredWeights] = {}
        """Where the denoisers' weights are, by the name they have in the pipeline."""
        self.meter: Meter | None = None
        """Counts what the models compute, where somebody wants to know."""
        self.lockstep = False
        """Every call must run every denoiser, rows for it or not: the other ranks wait for this one's part of it."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]) -> Policy:
        """Load the wanted parts of a diffusers folder.

        Raises:
            ConfigError: the folder holds another pipeline, or an option or size is not valid.
        """

    @property
    @abstractmethod
    def denoisers(self) -> dict[str, Any]:
        """Trainable modules by the name they have in the pipeline."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], images: Sequence[np.ndarray] | None = None) -> dict[str, Tensor]:
        """Return one row of every conditioning tensor per prompt; rows do not depend on their neighbors.

        Args:
            prompts: B prompts.
            images: B images (H, W, 3) uint8 of any size to start from, for families that take them.
        """

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

    def modules(self) -> dict[str, nn.Module]:
        """Return every module that is loaded, by its name in the pipeline."""
        return dict(self.denoisers)

    def move_decoder(self, device: torch.device) -> None:  # noqa: B027 - a family may have none
        """Move what only ``decode`` needs: off the device while nothing is decoded, and back."""

    @abstractmethod
    def save_lora(self, folder: Path) -> None:
        """Write the denoisers' LoRA weights in the form the pipeline's ``load_lora_weights`` reads, alpha included."""

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall | None:
        """Return how the plain pipeline draws what this policy draws with the ODE; None where there is no such call.

        Args:
            steps: denoising steps.
            negative_prompt: negative prompt of guidance by two forwards; None where there is none.
        """
        return None

    @classmethod  # noqa: B027 - most pipelines load without what they lack
    def complete(cls, folder: Path) -> None:
        """Write stand-ins of components that ``from_pretrained`` demands and an exported pipeline folder lacks."""

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return the components ``from_pretrained`` must be told that a pipeline folder lacks."""
        return ()
