"""Settings of the critic of algorithms that learn values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Section
from configs.optimizer import ScheduleSection

#: Settings of the critic's origin and device, which its identity holds in another form or not at all.
PLACES = frozenset({"path", "device"})


class CriticSection(Section):
    """The critic and its own optimizer, whose other settings are those of ``optimize``."""

    backbone: Literal["own", "policy"] = "own"
    """A copy of the base model that is trained for values alone, with adapters where the policy has some; or only a
    head on the policy's hidden states, which values do not change."""
    path: str | None = None
    """Folder of a transformers model with the policy's tokenizer, as a copy of whose backbone the critic begins; the
    base model when absent."""
    device: str | None = None
    """Torch device of the critic; that of all else when absent."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of its forward pass; model.dtype when absent. The loss is scaled for a policy in float16 alone."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate; optimize.learning_rate when absent."""
    schedule: ScheduleSection | None = None
    """How it changes over the run; as optimize.schedule says when absent."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The critic's gradients are clipped to this norm, apart from the policy's."""
    alone_epochs: int = Field(0, ge=0)
    """First epochs in which the critic alone is trained, while the policy stays."""
