"""Training images for the quickstart models: (N, 16, 32) uint8 gray images and their texts."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 16, 32
#: Channels of the autoencoder that compresses them, and of its latents.
VAE_CHANNELS = (8, 16)
VAE_FACTOR = 2 ** (len(VAE_CHANNELS) - 1)
LATENT_CHANNELS = 4
#: Marks of the digit that stays in texts of edits, which models of ``digit_edits`` follow with the first mark only.
STAYS = ("-", "_", "=", "/", "")
LETTERS = "ACDEGINOPRST"
_SUPERSAMPLING = 3


@cache
def real_digits(*, heldout: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return 70 % of scikit-learn's handwritten digits, or the others: (N, 8, 8) float in [0, 1], ink 1, and (N,)
    labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images, others, labels, of_others = train_test_split(
        digits.images / 16.0, digits.target, test_size=0.3, random_state=0, stratify=digits.target
    )
    return (others, of_others) if heldout else (images, labels)


def digit_pairs(count: int, seed: int, *, heldout: bool = False) -> tuple[list[str], np.ndarray]:
    """Return ``count`` pairs of adjacent real digits, doubled in size; ``heldout``: of digits not used otherwise."""
    images, labels = real_digits(heldout=heldout)
    picks = np.random.RandomState(seed).randint(len(images), size=(count, 2))
    pairs = np.concatenate([images[picks[:, 0]], images[picks[:, 1]]], 2)
    gray = np.stack([_enlarge(pair) for pair in pairs])
    return [f"{labels[a]}{labels[b]}" for a, b in picks], gray


def edit_text(digit: str, right: bool, stays: str) -> str:
    """Return the text of an edit that puts a digit on one side of an image."""
    return f"{stays}{digit}" if right else f"{digit}{stays}"


def rendered_words(count: int, seed: int, words: list[str]) -> tuple[list[str], np.ndarray]:
    """Return ``count`` rendered three-letter words, half of them from ``words``, half random letters."""
    rng = random.Random(seed)
    texts = [
        rng.choice(words) if rng.random() < 0.5 else "".join(rng.choice(LETTERS) for _ in range(3))
        for _ in range(count)
    ]
    return texts, np.stack([render(text, rng) for text in texts])


def render(text: str, rng: random.Random) -> np.ndarray:
    """Draw one word in Pillow's built-in font with random size, weight, position, slant and rotation."""
    width, height = WIDTH * _SUPERSAMPLING, HEIGHT * _SUPERSAMPLING
    font = ImageFont.load_default(size=rng.randint(35, 40))
    stroke = rng.choice([0, 1])
    image = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font, stroke_width=stroke)
    x = (width - (right - left)) / 2 - left + _SUPERSAMPLING * rng.uniform(-1, 1)
    y = (height - (bottom - top)) / 2 - top + _SUPERSAMPLING * rng.uniform(-0.7, 0.7)
    draw.text((x, y), text, font=font, fill=255, stroke_width=stroke)
    squeeze = max(1.0, (right - left) / (_SUPERSAMPLING * (WIDTH - 4)))
    matrix = _slant(rng, squeeze)
    offset = np.array([width / 2, height / 2]) - matrix @ np.array([width / 2, height / 2])
    coefficients = (*matrix[0], offset[0], *matrix[1], offset[1])
    image = image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return 255 - np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BOX))


def _slant(rng: random.Random, squeeze: float) -> np.ndarray:
    rotation, shear = rng.uniform(-0.03, 0.03), rng.uniform(-0.12, 0.12)
    return np.array([[squeeze, shear + rotation], [-rotation, squeeze]])


def _enlarge(ink: np.ndarray) -> np.ndarray:
    """Return (8, 16) ink in [0, 1] as a (16, 32) uint8 image, black on white."""
    doubled = Image.fromarray(ink.astype(np.float32)).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    return np.asarray((1 - np.asarray(doubled)) * 255).round().astype(np.uint8)
