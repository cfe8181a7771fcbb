"""Settings of the image model that renders a language model's texts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from configs.base import Section
from configs.model import ModelSection


class RenderSection(Section):
    """A frozen image model that draws texts; ``execution`` says on which device and in which batches."""

    model: ModelSection
    """The image model, and how it is called."""
    steps: int = Field(20, ge=1, le=10_000)
    """Denoising steps of an image."""
    solver: str = "euler"
    """Deterministic solver of these steps."""
    answer: tuple[str, str] | None = None
    """Marks around the part of a text that is rendered, as <answer> and </answer>: the last such part; nothing, as
    of an empty text, where one is missing."""
    images: int = Field(1, ge=1, le=100)
    """Images of each text; its reward is the mean of theirs."""
    same_noise: bool = True
    """The texts of a prompt are drawn from the same initial noise, so that images of a group differ by texts alone."""
    format: Literal["png", "webp"] = "png"
    """File format of the images: png keeps every value, webp is compressed visually lossless."""

    @field_validator("answer")
    @classmethod
    def _are_marks(cls, value: tuple[str, str] | None) -> tuple[str, str] | None:
        if value is not None and not all(value):
            raise ValueError("answer needs two marks that are not empty, before and after the rendered part")
        return value

    def drawn(self, text: str) -> str:
        """Return the rendered part of a text, without white space around it."""
        if self.answer is None:
            return text.strip()
        first, last = self.answer
        before, _, after = text.rpartition(first)
        found, closed, _ = after.partition(last)
        return found.strip() if closed and (before or text.startswith(first)) else ""
