"""Rewards without a model of their own: rank by another reward within a group, and a constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import RewardOptions
from flowmill.models.rewards.base import Batch, Bounds, Metadata, Needs, Scores, Sources
from flowmill.models.rewards.invocation import Handling, score
from flowmill.models.rewards.sizes import Takes


@dataclass(kw_only=True)
class Rank:
    """An image's rank among those of its prompt, by another reward: 1 / K for the worst of K, 1 for the best.
    Flow-Factory's ``PickScore_Rank`` is this of ``pickscore``. Samples that score the same share the mean of their
    ranks."""

    bounds: ClassVar[Bounds] = (0.0, 1.0)

    reward: str
    """The reward that orders them."""
    options: RewardOptions = field(default_factory=dict)
    """Its options."""
    device: str | None = None
    """Its device, where it takes one."""

    def __post_init__(self) -> None:
        from flowmill.models.rewards.factory import make_reward

        self._inner = make_reward(self.reward, self.options, device=self.device)

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the wrapped reward's needs, for a whole group; raise ConfigError if the option ``reward`` is
        missing."""
        from flowmill.models.rewards.factory import needs_of

        if "reward" not in options:
            raise ConfigError("reward 'rank' needs the option 'reward': the one that orders the samples of a group.")
        return replace(needs_of(str(options["reward"]), options.get("options", {})), groupwise=True)

    @staticmethod
    def takes(options: Mapping[str, Any]) -> Takes | None:
        """Return the wrapped reward's memory."""
        from flowmill.models.rewards.factory import takes_of

        return takes_of(str(options["reward"]), options.get("options", {}))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources = ()) -> Scores:
        """Return (K,) ranks of the samples of one group over K, with the wrapped reward's notes."""
        batch = Batch(media=media, prompts=prompts, metadata=metadata, references=references)
        scores = score(self._inner, self.reward, batch, Handling(frames="clip"))
        return Scores(mean_ranks(scores.values) / np.float32(len(batch)), scores.notes)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of (K,) values, 1 the smallest, float32; equal values share the mean of their ranks."""
    below = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return (below + (equal + 1) / 2).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same score for everything: trains nothing, and measures a pipeline's cost without a reward."""

    value: float = 0.0
    """The score."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return (B,) times the value."""
        return Scores(np.full(len(prompts), self.value, np.float32))
