"""Architecture facts that decide the memory of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """Architecture facts that decide the memory of a text encoder."""

    width: int
    """Of its layers."""
    inner: int
    """Of their feed-forwards."""
    heads: int = 0
    """Whose attention scores are computed as such, as T5's are; 0: they are never held."""
    kept: int = 0
    """Layers whose outputs are kept until the last is computed."""

    def row(self, tokens: int, number: int) -> int:
        """Return the bytes that encoding a text of so many tokens takes at most, of numbers of so many bytes."""
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
    """How many there are."""
    latents: tuple[int, int, int] = (16, 8, 1)
    """Latent channels, pixels a latent is wide, frames it is long."""
    chunk: tuple[int, int, int] | None = None
    """Of autoencoders that encode clips in parts: frames of one, latents it keeps, latents of what is beyond the last;
    None: the first latent is one frame, and all others as many."""
    text_tokens: int = 512
    """Text tokens, for models that attend to text and latents together."""
    further_text: int = 0
    """Of these the ones that no setting changes: CLIP's, before T5's."""
    patch: int = 2
    """Latents a token is wide."""
    image_tokens: bool = False
    """The image a prompt starts from is appended to the generated tokens, as many again."""
    text_parameters: int = 0
    """Of all text encoders, and of image encoders where prompts come with images."""
    text: TextEncoder = T5
    """The largest text encoder."""
    vae: Mapping[str, Any] | None = None
    """Class and arguments of a folder's own autoencoder; None: the published one of the denoiser's class."""

    def latent_frames(self, frames: int) -> int:
        """Return how many frames the latents of a clip have."""
        if self.chunk is None:
            return (frames - 1) // self.latents[2] + 1
        length, kept, beyond = self.chunk
        return frames // length * kept + beyond

    def tokens(self, *, height: int, width: int, frames: int, references: int = 0) -> int:
        """Return the tokens of one row, text aside; ``references``: pixels of its reference images."""
        unit = self.latents[1] * self.patch
        made = self.latent_frames(frames) * (height // unit) * (width // unit)
        return made * (2 if self.image_tokens else 1) + references // unit**2
