"""Settings of a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from flowmill.configs.base import Component, Section


class ServerSection(Section):
    """A server that scores with one reward."""

    url: str
    """Its address, such as http://127.0.0.1:8600."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds to wait for an answer."""
    concurrency: int = Field(4, ge=1)
    """Concurrent requests per process."""
    patience_s: float = Field(120.0, ge=0)
    """Seconds of failing retries after which the run stops; it can be resumed."""

    @model_validator(mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class RewardSection(Component):
    """One reward model."""

    removed: ClassVar[Mapping[str, str]] = {
        "modality": (
            "A sample has one advantage, of all its rewards. Remove it; advantage.aggregation 'gdpo' weighs rewards "
            "of different scales alike."
        ),
        "over_frames": "A clip has the mean score of its frames; a reward of your own can read whole clips.",
        "spread": "Give the reward a GPU of its own: flowmill serve-reward, and its address in 'server'.",
    }
    former: ClassVar[Mapping[str, Any]] = {"over_frames": "mean"}
    weight: float = 1.0
    """Factor of this reward in the weighted sum."""
    label: str | None = None
    """Name in tables, metrics and lineage; the component's name when absent."""
    frames: PositiveInt | Literal["first", "clip"] = 1
    """For clips: score every n-th frame, the first frame, or the whole clip in one call."""
    reads: Literal["images", "texts"] | None = None
    """In runs with a section `render`: score the images (also when absent) or the texts."""
    sources: tuple[str, ...] = ()
    """Names of `prompts.sources` whose samples it scores; all when empty."""
    threshold: float | None = None
    """Optimize 1 if the score reaches this and 0 otherwise, instead of the score."""
    standardize: bool = False
    """Subtract the mean of the score over the epoch and divide by its standard deviation, before weighting."""
    on_failure: Literal["stop", "exclude_sample", "exclude_group"] = "stop"
    """Effect of a sample that cannot be scored: stop the run, or exclude the sample or its group from training."""
    device: str | None = None
    """Torch device of a reward that takes one (cpu, cuda:1); the reward's default when absent."""
    batch_size: PositiveInt | None = None
    """Rows per call of the reward; the reward's default, or a whole shard, when absent."""
    server: ServerSection | None = None
    """A `flowmill serve-reward` that scores in this reward's place: its address alone, or a section."""

    @property
    def slot(self) -> str:
        """The label, or the component's name."""
        return self.label or self.name

    @property
    def weighted(self) -> str:
        """Its slot with its weight, as in a sum: ``digits``, or ``0.5 x digits``."""
        return self.slot if self.weight == 1 else f"{self.weight:g} x {self.slot}"

    @property
    def excludes(self) -> bool:
        """Whether samples that cannot be scored are recorded instead of stopping the run."""
        return self.on_failure != "stop"
