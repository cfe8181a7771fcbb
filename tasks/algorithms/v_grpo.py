"""V-GRPO (arXiv 2604.23380): AWM with errors divided by their own size, at levels and noise shared within a group.

The log-prob is -t mean e^2 / mean |e| with the flow-matching error e, the divisor without gradient. Samples of a group
are evaluated with the same noise at the same levels, one level in each part of the range. The paper uses
``advantage.soft_clip`` 3 and one update per epoch, where every ratio is exactly 1 and the clip has no effect.
Signs and rows of advantage 0 are as in AWM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowmill.tasks.algorithms.awm import AWM
from flowmill.tasks.algorithms.base import ForwardTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class VGRPO(AWM):
    """The surrogate of a third-party trainer, with one ratio per level; the paper averages errors over levels."""

    weighting: Literal["uniform", "t", "t2", "huber", "ghuber", "adaptive"] = "adaptive"
    """Weighting of the error, see ``awm.AWM``."""

    def levels(self, **forced: Any) -> ForwardTimes:
        """Return the noise levels, shared within a group."""
        return AWM.levels(self, **{"shared": True, **self.times, **forced})
