"""Settings of the image model that renders a language model's texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from flowmill.configs.base import Later, Section
from flowmill.configs.model import ModelSection


class TurnsSection(Section):
    """Several texts per sample: after each image the language model reads a comment on it and writes another text.

    A sample is the whole conversation; training leaves out the tokens that the language model did not choose.
    """

    removed: ClassVar[Mapping[str, str]] = {"returns": "The rewards of a sample's last turn are trained on. Remove it."}
    former_later: ClassVar[Mapping[str, Any]] = {"returns": "last"}
    count: int = Field(2, ge=2, le=16)
    """Most texts of a sample."""
    comment: str = "{note} {score}"
    """The comment on an image: {note} is the remark and {score} the score, with two digits, of ``by``. With a chat
    template it is a message of the user, else it follows the text before as it is. Empty only with ``sees: images``."""
    by: str | None = None
    """Label of the reward or monitor of images that comments. None: the first reward of images."""
    comment_tokens: int = Field(64, ge=1)
    """Most tokens of a comment; the rest is left out."""
    done: str | None = Field(None, min_length=1)
    """Mark in a text after which no other follows. The text without the mark is drawn; if nothing is left, the image
    before remains. None: all samples have ``count`` texts."""
    cost: float = Field(0.0, ge=0)
    """Subtracted from the weighted sum of rewards for every image after the first."""
    sees: Annotated[Literal["comments", "images"], Later()] = "comments"
    """With images a vision-language model also sees the images of earlier turns, each before its comment."""

    def said(self, note: str, score: float | None) -> str:
        """Return the comment for a remark and a score; None: the image could not be scored."""
        number = "" if score is None else f"{score:.2f}"
        return self.comment.replace("{score}", number).replace("{note}", note)

    def ends(self, text: str) -> bool:
        """Return whether no other text follows a text."""
        return self.done is not None and self.done in text


class RenderSection(Section):
    """A frozen image model that renders texts; ``execution`` sets its device and batch size."""

    removed: ClassVar[Mapping[str, str]] = {
        "solver": "Images are drawn with 'euler'. Remove it.",
        "format": "Images are stored as PNG files. Remove it.",
    }
    former: ClassVar[Mapping[str, Any]] = {"solver": "euler", "format": "png"}
    model: ModelSection
    """The image model and the inputs of its calls."""
    steps: int = Field(20, ge=1, le=10_000)
    """Denoising steps of an image."""
    answer: tuple[str, str] | None = None
    """Marks around the rendered part of a text, such as <answer> and </answer>: the last such part is rendered; a text
    without both marks counts as empty."""
    images: int = Field(1, ge=1, le=100)
    """Images per text; the text's reward is the mean of theirs."""
    same_noise: bool = True
    """Render the texts of a prompt from the same initial noise, so that images of a group differ only by their text."""
    turns: Annotated[TurnsSection | None, Later()] = None
    """Let the language model see comments on its images and write again. None: one text per sample."""

    @field_validator("answer")
    @classmethod
    def _are_marks(cls, value: tuple[str, str] | None) -> tuple[str, str] | None:
        if value is not None and (not all(value) or value[0] == value[1]):
            raise ValueError("answer needs two different marks that are not empty, before and after the rendered part")
        return value

    def drawn(self, text: str) -> str:
        """Return the rendered part of a text, without white space around it."""
        if self.turns is not None and self.turns.done is not None:
            text = text.replace(self.turns.done, "")
        if self.answer is None:
            return text.strip()
        first, last = self.answer
        # An opening mark after the last closing one opens no part.
        opened, content = text.rpartition(last)[0].rpartition(first)[1:]
        return content.partition(last)[0].strip() if opened else ""
