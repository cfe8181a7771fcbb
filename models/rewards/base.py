"""The interface of rewards: required methods, optional declarations, and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from flowmill.models.rewards.errors import Origin as Origin

T = TypeVar("T")
#: The lowest and the highest score that a reward can give.
Bounds = tuple[float, float]
#: The other columns of the prompt source, a mapping per sample; the source images of each prompt, (H, W, 3) uint8.
Metadata = Sequence[Mapping[str, Any]]
Sources: TypeAlias = "Sequence[Sequence[np.ndarray]]"


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and, optionally, a note per sample."""

    values: np.ndarray
    """(B,) float32, higher is better; NaN where a sample's score failed and failures are excluded."""
    notes: Sequence[str] | None = None
    """One remark per sample (such as the text an OCR read), shown under images; the error of a failed sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of a reward: class attribute ``needs``, or ``@declare(...)`` on a function."""

    media: Literal["samples", "images", "clips", "sounds", "latents", "texts"] = "samples"
    """Media it scores; 'samples': the samples of the run, images or texts, 'clips': whole clips, 'sounds': the sound of
    clips, 'latents': the model's output before decoding, 'texts': strings."""
    rate: int | None = None
    """Sample rate in Hz that sounds are resampled to; None: their original rate."""
    columns: tuple[str, ...] = ()
    """Required columns of the prompt source."""
    groupwise: bool = False
    """It is called once per group, with all samples of one prompt, so that it can compare them."""
    accelerated: bool = False
    """It runs on the accelerator: with several processes each rank scores its own shards."""
    references: bool = False
    """It is called with a fourth argument: the source images of each prompt, see ``Reward.score``."""
    batch_size: int | None = None
    """Rows per call where ``rewards[].batch_size`` is not set; None: a whole shard."""
    watched_by: tuple[tuple[str, str], ...] = ()
    """Recommended monitors where it is optimized, each with a reason; ``flowmill check`` recommends them."""


class Reward(Protocol):
    """Scores samples.

    The class may set ``perfect``, the score that counts as an exact match, ``bounds``, the lowest and the highest
    possible score, which limit the intervals of its means, and ``needs``, a ``Needs``. If the needs depend on options,
    a static method ``needs_for(options)`` returns them instead. A reward whose scores have a gradient also has a method
    ``differentiable``, see ``flowmill.models.rewards.differentiable``. One that runs on the accelerator may have a
    static method ``takes(options)`` that returns the memory of its models there,
    ``flowmill.models.rewards.sizes.Takes``, or None; ``flowmill check`` counts it.
    """

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return one score per sample.

        Args:
            media: (B, H, W, 3) uint8 images; (B, F, H, W, 3) clips where the config passes whole clips; (B,)
                strings (an array of objects) where the run generates texts; (B, N, C) float32 sounds from -1 to 1, or
                (B, ...) float32 latents, for a reward that needs those.
            prompts: B prompts.
            metadata: B mappings with the other columns of the prompt source.

        A reward that needs references gets a fourth argument: the source images of each of the B prompts, in order,
        read-only (H, W, 3) uint8 arrays of any size.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples to score."""

    media: np.ndarray
    """(B, ...), see ``Reward.score``."""
    prompts: Sequence[str]
    metadata: Metadata
    groups: Sequence[str] = ()
    """B group ids; a groupwise reward scores the samples of one group together."""
    references: Sources = ()
    """The source images of each of the B prompts, (H, W, 3) uint8; empty where no reward needs them."""
    origin: Origin | None = None
    """Where the samples come from, for messages."""

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return some rows; a row may repeat."""
        return Batch(
            media=self.media[list(rows)],
            prompts=[self.prompts[row] for row in rows],
            metadata=[self.metadata[row] for row in rows],
            groups=[self.groups[row] for row in rows] if self.groups else (),
            references=[self.references[row] for row in rows] if self.references else (),
            origin=None if self.origin is None else self.origin.take(rows),
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return several batches as one; it has an origin, with the first shard, if all of them have one."""
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
    """Return a decorator that declares the ``Needs`` of a reward function or class."""

    def declared(reward: T) -> T:
        reward.needs = Needs(**needs)  # type: ignore[attr-defined]
        return reward

    return declared


def perfect_score(reward: Reward) -> float | None:
    """Return the score that counts as an exact match, or None where the reward has none."""
    perfect = getattr(reward, "perfect", None)
    return None if perfect is None else float(perfect)


def text_in(fields: Mapping[str, Any], column: str) -> str:
    """Return a column of a prompt as text; raise ValueError if it holds neither a text nor a number."""
    value = fields[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the column '{column}' holds {value!r:.60}, neither a text nor a number. Mend the prompts")
    return str(value)


def quoted_text(prompt: str) -> str:
    """Return the text between the first pair of double quotes, or the whole prompt without quotes. Flow-GRPO's
    ``ocr.py`` takes the quoted text and fails without quotes; Flow-Factory takes the whole prompt."""
    parts = prompt.split('"')
    return parts[1] if len(parts) >= 3 else prompt
