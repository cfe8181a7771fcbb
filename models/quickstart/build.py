"""The quickstart's builders: corpus, fresh pipeline, pre-training, folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import numpy as np

from models.quickstart.corpus import digit_pairs, rendered_words
from models.quickstart.pipeline import LATENT_CHANNELS, VAE_FACTOR, tiny_pipeline
from models.quickstart.pretrain import Report, pretrain


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsBuilder:
    """Two real handwritten digits per image; the prompt is the number in double quotes."""

    steps: int = 320
    """Flow-matching steps: 320 give a base that draws about 60 % of its images right, 500 about 78 %."""
    vae_steps: int = 150
    """Autoencoder steps."""
    images: int = 12000
    """Corpus size."""

    latents: ClassVar[tuple[int, int]] = (LATENT_CHANNELS, VAE_FACTOR)
    """Latent channels and how many pixels a latent is wide."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a pre-trained diffusers folder."""
        texts, images = digit_pairs(self.images, seed=1)
        _build(folder, texts, images, steps=(self.vae_steps, self.steps), report=report)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsBuilder:
    """Three-letter words over twelve letters in Pillow's font; the prompt is the word in double quotes."""

    steps: int = 1200
    """Flow-matching steps."""
    vae_steps: int = 200
    """Autoencoder steps."""
    images: int = 12000
    """Corpus size."""

    latents: ClassVar[tuple[int, int]] = (LATENT_CHANNELS, VAE_FACTOR)
    """Latent channels and how many pixels a latent is wide."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a pre-trained diffusers folder."""
        texts, images = rendered_words(self.images, 1, _words())
        _build(folder, texts, images, steps=(self.vae_steps, self.steps), report=report)


def _words() -> list[str]:
    return files("models.quickstart").joinpath("words.txt").read_text().split()


def _build(folder: Path, texts: list[str], images: np.ndarray, *, steps: tuple[int, int], report: Report) -> None:
    pipeline = tiny_pipeline()
    pretrain(pipeline, texts, images, vae_steps=steps[0], steps=steps[1], report=report)
    pipeline.save_pretrained(folder)
