"""The quickstart's builders: corpus, fresh pipeline, pre-training, folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from flowmill.models.quickstart.corpus import LATENT_CHANNELS, VAE_FACTOR, digit_pairs, rendered_words

if TYPE_CHECKING:
    from flowmill.models.quickstart.base import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsBuilder:
    """Two real handwritten digits per image; the prompt is the number in double quotes."""

    steps: int = 320
    """Flow-matching steps: 320 give a base model with some 60 % right images, 500 some 78 %."""
    vae_steps: int = 150
    """Autoencoder steps."""
    images: int = 12000
    """Corpus size."""
    prompt_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rows that are trained with an empty prompt, as classifier-free guidance needs a negative prompt."""

    family: ClassVar[str] = "sd3"
    latents: ClassVar[tuple[int, int]] = (LATENT_CHANNELS, VAE_FACTOR)

    def build(self, folder: Path, report: Report) -> None:
        """Write a pre-trained diffusers folder."""
        from flowmill.models.quickstart.pipeline import tiny_pipeline
        from flowmill.models.quickstart.pretrain import pretrain

        texts, images = digit_pairs(self.images, seed=1)
        pipeline = tiny_pipeline()
        pretrain(
            pipeline,
            texts,
            images,
            vae_steps=self.vae_steps,
            steps=self.steps,
            report=report,
            prompt_dropout=self.prompt_dropout,
        )
        pipeline.save_pretrained(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsBuilder:
    """Three-letter words over twelve letters in Pillow's font; the prompt is the word in double quotes."""

    steps: int = 1200
    """Flow-matching steps."""
    vae_steps: int = 200
    """Autoencoder steps."""
    images: int = 12000
    """Corpus size."""

    family: ClassVar[str] = "sd3"
    latents: ClassVar[tuple[int, int]] = (LATENT_CHANNELS, VAE_FACTOR)

    def build(self, folder: Path, report: Report) -> None:
        """Write a pre-trained diffusers folder."""
        from flowmill.models.quickstart.pipeline import tiny_pipeline
        from flowmill.models.quickstart.pretrain import pretrain

        words = files("flowmill.models.quickstart").joinpath("words.txt").read_text().split()
        texts, images = rendered_words(self.images, 1, words)
        pipeline = tiny_pipeline()
        pretrain(pipeline, texts, images, vae_steps=self.vae_steps, steps=self.steps, report=report)
        pipeline.save_pretrained(folder)
