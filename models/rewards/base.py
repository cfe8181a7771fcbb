"""What a reward must provide, what it may declare, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from models.rewards.errors import Origin as Origin

T = TypeVar("T")
#: The lowest and the highest score that a reward can give.
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and, optionally, what the reward saw."""

    values: np.ndarray
    """(B,) float32, higher is better; NaN where a sample's score failed and failures are excluded."""
    notes: Sequence[str] | None = None
    """One remark per sample (the text an OCR read, say), shown under images; of a failed one why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a reward needs of its caller: class attribute ``needs``, or ``@declare(...)`` on a function."""

    media: Literal["samples", "images", "clips", "sounds", "latents", "texts"] = "samples"
    """What it scores; 'samples': what the run makes, images or texts, 'clips': whole ones, 'sounds': what is heard with
    clips, 'latents': what the model made, before any decoding, 'texts': strings."""
    rate: int | None = None
    """Of sounds, how many samples a second they are brought to; None: as many as they were made with."""
    columns: tuple[str, ...] = ()
    """Columns of the prompt source it cannot do without."""
    groupwise: bool = False
    """It is called once per group, with all samples of one prompt, so that it can compare them."""
    accelerated: bool = False
    """It works on the accelerator: with several processes the ranks score with it, each its own shards."""
    references: bool = False
    """It is called with a fourth argument: of each prompt the images it starts from, see ``Reward.score``."""
    batch_size: int | None = None
    """Rows per call where ``rewards[].batch_size`` says nothing; None: a whole shard."""
    spreads: bool = False
    """Each call runs the same layers in the same order, whatever its samples are, and ``settled`` places them: so
    ranks can hold them together, each a part, and make every call together (``rewards[].spread``)."""
    watched_by: tuple[tuple[str, str], ...] = ()
    """Monitors that should stand beside it where it is optimized, each with why; ``flowmill check`` says so."""


class Reward(Protocol):
    """Scores samples.

    The class may set ``perfect``, the score that counts as an exact match, ``bounds``, the lowest and the highest score
    it can give, within which intervals of its means stay, and ``needs``, a ``Needs``. One whose needs depend on its
    options has them as a property, and a static method ``needs_for(options)`` that returns them too. One whose scores
    have a gradient has a method ``differentiable`` beside, see ``models.rewards.differentiable``. One that
    works on the accelerator may have a static method ``takes(options)``, which returns what its models take there,
    ``models.rewards.sizes.Takes``, or None; ``flowmill check`` counts it.
    """

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return one score per sample.

        Args:
            media: (B, H, W, 3) uint8 images; (B, F, H, W, 3) clips where the config hands over whole clips; (B,)
                strings (an array of objects) where the run makes texts; (B, N, C) float32 sounds from -1 to 1, or
                (B, ...) float32 latents, for a reward that needs those.
            prompts: B prompts.
            metadata: B mappings with the other columns of the prompt source.

        One that needs references is given them as a fourth argument: of B prompts the images they start from, in order,
        (H, W, 3) uint8 of any size, which cannot be written to.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples to score."""

    media: np.ndarray
    """(B, ...), see ``Reward.score``."""
    prompts: Sequence[str]
    """B prompts."""
    metadata: Sequence[Mapping[str, Any]]
    """B mappings."""
    groups: Sequence[str] = ()
    """B group ids; samples of one group belong together for a reward that is groupwise."""
    references: Sequence[Sequence[np.ndarray]] = ()
    """Of B prompts the images they start from, (H, W, 3) uint8; empty where no reward asks for them."""
    origin: Origin | None = None
    """Where the samples come from, for messages."""

    def __len__(self) -> int:
        """Return B."""
        return len(self.prompts)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return some rows, a row as often as it is named."""
        return Batch(
            media=self.media[list(rows)],
            prompts=[self.prompts[row] for row in rows],
            metadata=[self.metadata[row] for row in rows],
            groups=[self.groups[row] for row in rows] if self.groups else (),
            references=[self.references[row] for row in rows] if self.references else (),
            origin=None if self.origin is None else self.origin.take(rows),
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches as one; where they are from is told if all say it, with the first shard."""
    if len(batches) == 1:
        return batches[0]
    origins = [batch.origin for batch in batches if batch.origin is not None]
    samples = [sample for origin in origins for sample in origin.samples]
    return Batch(
        media=np.concatenate([batch.media for batch in batches]),
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        metadata=[row for batch in batches for row in batch.metadata],
        groups=[group for batch in batches for group in batch.groups],
        references=[images for batch in batches for images in batch.references],
        origin=Origin(samples=samples, shard=origins[0].shard) if len(origins) == len(batches) else None,
    )


def declare(**needs: Any) -> Callable[[T], T]:
    """Return a decorator that says what a reward function or class needs; see ``Needs``."""

    def declared(reward: T) -> T:
        reward.needs = Needs(**needs)  # type: ignore[attr-defined]
        return reward

    return declared


def perfect_score(reward: Reward) -> float | None:
    """Return the score that counts as an exact match, None where the reward knows of none."""
    perfect = getattr(reward, "perfect", None)
    return None if perfect is None else float(perfect)


def quoted_text(prompt: str) -> str:
    """Return the text between the first pair of double quotes, or the whole prompt without quotes.

    Flow-GRPO's ``ocr.py`` takes the quoted text and fails without quotes; Flow-Factory takes the whole prompt.
    """
    parts = prompt.split('"')
    return parts[1] if len(parts) >= 3 else prompt
