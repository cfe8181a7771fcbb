"""Settings of the image model that renders a language model's texts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from configs.base import Section
from configs.model import ModelSection


class RenderSection(Section):
    """A frozen image model that renders texts; ``execution`` sets its device and batch size."""

    model: ModelSection
    """The image model and the inputs of its calls."""
    steps: int = Field(20, ge=1, le=10_000)
    """Denoising steps of an image."""
    solver: str = "euler"
    """Deterministic solver of these steps."""
    answer: tuple[str, str] | None = None
    """Marks around the rendered part of a text, such as <answer> and </answer>: the last such part is rendered; a text
    without both marks counts as empty."""
    images: int = Field(1, ge=1, le=100)
    """Images per text; the text's reward is the mean of theirs."""
    same_noise: bool = True
    """Render the texts of a prompt from the same initial noise, so that images of a group differ only by their text."""
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
