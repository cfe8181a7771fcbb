"""V-GRPO (arXiv 2604.23380): AWM whose errors are divided by their own size, at levels and noise a group shares.

The log-prob is -t mean e^2 / mean |e| with the flow-matching error e, the divisor without gradient. Samples that are
compared are looked at through the same noise at the same levels, one level in each part of the range. Published are
``advantage.soft_clip`` 3 and one update per epoch, where every ratio is exactly 1 and no clip acts.
Signs and rows of advantage 0 are as in AWM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tasks.algorithms.awm import AWM
from tasks.algorithms.base import ForwardTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class VGRPO(AWM):
    """The surrogate as a third-party trainer has it, ratio by ratio of a level; the paper means errors over levels."""

    weighting: Literal["uniform", "t", "t2", "huber", "ghuber", "adaptive"] = "adaptive"
    """As of AWM."""

    def levels(self, **forced: Any) -> ForwardTimes:
        """Return the noise levels, the same for all of a group."""
        return AWM.levels(self, **{"shared": True, **self.times, **forced})
