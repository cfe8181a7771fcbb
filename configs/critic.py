"""Settings of the critic of algorithms that learn values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from flowmill.configs.base import Later, Section
from flowmill.configs.optimizer import ScheduleSection

_Settings = TypeVar("_Settings", bound=BaseModel)
#: Settings of the critic's origin, which its fingerprint holds in another form.
PLACES = frozenset({"path"})


class CriticSection(Section):
    """The critic and its own optimizer; all other settings are those of ``optimize``."""

    removed: ClassVar[Mapping[str, str]] = {
        "device": "The critic is on the device of its process: more execution.processes, or critic.backbone 'policy'."
    }

    backbone: Literal["own", "policy"] = "own"
    """own: a copy of the base model trained only for values, with adapters if the policy has them. policy: only a head
    on the policy's hidden states, which the value loss does not change."""
    path: str | None = None
    """Folder of a transformers model with the policy's tokenizer, whose backbone initializes the critic; the base model
    when absent."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of its forward pass; model.dtype when absent. Loss scaling exists only for a policy in float16."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate; optimize.learning_rate when absent."""
    schedule: ScheduleSection | None = None
    """Schedule of the learning rate; optimize.schedule when absent."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The critic's gradients are clipped to this norm, separately from the policy's."""
    log_probs: Annotated[bool, Later()] = False
    """The critic also reads the log-prob with which each token was sampled: an unlikely token is often a mistake."""
    alone_epochs: int = Field(0, ge=0)
    """Number of first epochs that train only the critic, with a fixed policy."""

    def settings_of(self, policy: _Settings) -> _Settings:
        """Return the optimizer settings of the critic: those of a policy, overridden by its own."""
        own = {name: getattr(self, name) for name in ("learning_rate", "schedule", "max_grad_norm")}
        return policy.model_copy(update={name: value for name, value in own.items() if value is not None})
