"""Architecture facts that decide the memory of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """Architecture facts that decide the memory of a text encoder."""

    width: int
    """Width of its layers."""
    inner: int
    """Inner width of their feed-forwards."""
    heads: int = 0
    """Heads whose attention scores are materialized, as T5's are; 0: scores are never stored."""
    kept: int = 0
    """Layers whose outputs are kept until the last is computed."""

    def row(self, tokens: int, number: int) -> int:
        """Return the peak bytes of encoding a text of ``tokens`` tokens, with ``number`` bytes per number."""
        # As in any transformer's feed-forward: input, residual, norm and copies; activation, gate and product.
        layer = tokens * (5 * self.width + 3 * self.inner) * number
        # Scores, and their softmax in float32 and back.
        return layer + self.kept * tokens * self.width * number + self.heads * tokens**2 * (2 * number + 4)


#: T5-XXL's.
T5 = TextEncoder(width=4096, inner=10240, heads=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture facts that decide the memory of a pipeline."""

    denoiser: str
    """diffusers class of the denoiser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ from the class's defaults."""
    denoisers: int = 1
    """Number of denoisers."""
    latents: tuple[int, int, int] = (16, 8, 1)
    """Latent channels, and pixels per side and frames of a latent."""
    chunk: tuple[int, int, int] | None = None
    """For autoencoders that encode clips in parts: frames and kept latents of a part, latents of the remainder;
    None: the first latent is one frame, and each other one has ``latents[2]``."""
    text_tokens: int = 512
    """Text tokens, for models that attend to text and latents together."""
    further_text: int = 0
    """The text tokens among these that no setting changes: CLIP's, before T5's."""
    patch: int = 2
    """Latents per side of a token."""
    image_tokens: bool = False
    """The prompt's source image is appended to the generated tokens, with as many tokens."""
    text_parameters: int = 0
    """Parameters of all text encoders, and of image encoders where prompts come with images."""
    text: TextEncoder = T5
    """The largest text encoder."""
    vae: Mapping[str, Any] | None = None
    """Class and arguments of a folder's own autoencoder; None: the published one of the denoiser's class."""

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames of a clip."""
        if self.chunk is None:
            return (frames - 1) // self.latents[2] + 1
        length, kept, beyond = self.chunk
        return frames // length * kept + beyond

    def tokens(self, *, height: int, width: int, frames: int, references: int = 0) -> int:
        """Return the tokens of one row, without text; ``references``: pixels of its reference images."""
        unit = self.latents[1] * self.patch
        made = self.latent_frames(frames) * (height // unit) * (width // unit)
        return made * (2 if self.image_tokens else 1) + references // unit**2
