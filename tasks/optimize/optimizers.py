"""Optimizers: which there are, and what of each is written and read again.

A new optimizer is a class of ``torch.optim.Optimizer`` with the methods of ``tasks.optimize.adamw:AdamW``, in a file of
its own, and one line in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from configs.critic import CriticSection
from configs.errors import ConfigError
from configs.registry import Table, resolve
from configs.schema import OptimizeSection, RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

OPTIMIZERS = Table(
    {
        "adamw": "tasks.optimize.adamw:AdamW",
        "adamw8bit": "tasks.optimize.adamw8bit:AdamW8bit",
    },
    like="tasks.optimize.optimizers:MomentOptimizer",
)


class MomentOptimizer(Protocol):
    """What training asks of an optimizer, beside ``step`` and ``zero_grad``."""

    moment_bytes: ClassVar[float]
    """Bytes of one moment of one number."""
    fuses: ClassVar[bool]
    """``execution.fused_adamw`` does something."""

    def step(self) -> object:
        """Change the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    def begin(self, parameter: nn.Parameter) -> None:
        """Give a parameter the moments it has before its first step."""

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept of a parameter, by kind, as it is held; nothing before its first step."""


def adamw_settings(section: OptimizeSection) -> dict[str, Any]:
    """Return the arguments every AdamW takes."""
    return {
        "lr": section.learning_rate,
        "betas": section.betas,
        "weight_decay": section.weight_decay,
        "eps": section.epsilon,
    }


def make_optimizer(
    parameters: Sequence[nn.Parameter], section: OptimizeSection, *, fused: bool = False
) -> MomentOptimizer:
    """Return the configured optimizer.

    Args:
        parameters: float32.
        section: the settings.
        fused: carry out a step as one kernel.
    """
    kind = resolve(OPTIMIZERS, section.optimizer, what="optimize.optimizer")
    made: MomentOptimizer = kind(parameters, section, fused=fused)
    return made


def critic_settings(section: OptimizeSection, critic: CriticSection) -> OptimizeSection:
    """Return how a critic is trained: as the policy, but for what its own section says."""
    own = {"learning_rate": critic.learning_rate, "schedule": critic.schedule, "max_grad_norm": critic.max_grad_norm}
    return section.model_copy(update={name: value for name, value in own.items() if value is not None})


def check_optimizer(config: RunConfig) -> None:
    """Check that there is such an optimizer, and that it heeds what is set.

    Raises:
        ConfigError: it cannot be imported, or a setting would do nothing.
    """
    name = config.optimize.optimizer
    kind: type[MomentOptimizer] = resolve(OPTIMIZERS, name, what="optimize.optimizer")
    if config.execution.fused_adamw and not kind.fuses:
        raise ConfigError(f"execution.fused_adamw has no effect on optimize.optimizer '{name}'. Remove it.")
