"""Settings of a reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.base import Component, Section


class ServerSection(Section):
    """A server that scores with one reward."""

    url: str
    """Its address, http://127.0.0.1:8600 for one."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds to wait for an answer."""
    concurrency: int = Field(4, ge=1)
    """Requests of a process at a time."""
    patience_s: float = Field(120.0, ge=0)
    """Seconds of failures, each tried again, after which the run stops; it can be resumed."""

    @model_validator(mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class RewardSection(Component):
    """One reward model."""

    weight: float = 1.0
    """Factor of this reward in the weighted sum."""
    label: str | None = None
    """Name in tables, metrics and lineage; the component's name when absent."""
    frames: PositiveInt | Literal["first", "clip"] = 1
    """Of clips: score every n-th frame, the first frame, or hand over the whole clip."""
    reads: Literal["images", "texts"] | None = None
    """In runs with a section `render`: whether it scores the images, as it does when absent, or the texts."""
    sources: tuple[str, ...] = ()
    """Names of `prompts.sources` whose samples it scores; all when empty."""
    over_frames: Literal["mean", "min"] = "mean"
    """Of clips whose frames are scored: the mean over frames, or that of the worst."""
    modality: str | None = None
    """The modality it judges, whose log-prob alone its advantage trains: of clips with sound video or audio; all when
    absent."""
    threshold: float | None = None
    """Optimize whether the score reaches this, 1 or 0, instead of the score."""
    standardize: bool = False
    """Divide the score by its standard deviation over the epoch, after taking off its mean, before it is weighted."""
    on_failure: Literal["stop", "exclude_sample", "exclude_group"] = "stop"
    """Effect of a sample that cannot be scored: stop the run, or leave itself or its whole group out of training."""
    device: str | None = None
    """Torch device of a reward that takes one (cpu, cuda:1); its own choice when absent."""
    batch_size: PositiveInt | None = None
    """Rows per call of the reward; its own choice, or a whole shard, when absent."""
    spread: bool = False
    """Each rank holds a part of every layer of its model, and all make its calls together; of rewards that can."""
    server: ServerSection | None = None
    """A `flowmill serve-reward` that scores in this reward's place: its address alone, or with how it is asked."""

    @property
    def slot(self) -> str:
        """The label, or the component's name."""
        return self.label or self.name

    @property
    def excludes(self) -> bool:
        """Whether samples that cannot be scored are recorded instead of stopping the run."""
        return self.on_failure != "stop"
