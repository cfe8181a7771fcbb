"""Optimizers, and the part of their state that is stored.

A new optimizer is a ``torch.optim.Optimizer`` class with the methods of ``flowmill.tasks.training.adamw:AdamW``, in
its own file, and one line in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flowmill.configs.execution import ExecutionSection
from flowmill.configs.registry import Table, resolve
from flowmill.configs.schema import OptimizeSection, RunConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OPTIMIZERS = Table(
    {
        "adamw": "flowmill.tasks.training.adamw:AdamW",
        "adamw8bit": "flowmill.tasks.training.adamw8bit:AdamW8bit",
    },
    like="flowmill.tasks.training.optimizers:MomentOptimizer",
)


class MomentOptimizer(Protocol):
    """The interface of optimizers."""

    def step(self) -> object:
        """Change the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    def begin(self, parameter: nn.Parameter) -> None:
        """Create the initial moments of a parameter."""

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, by kind, as stored; empty before its first step."""


class OptimizerClass(MomentOptimizer, Protocol):
    """The class of an optimizer in the table."""

    moment_bytes: ClassVar[float]
    """Bytes per value of one moment."""
    step_bytes: ClassVar[int]
    """Bytes per value that a step needs besides moments and gradients."""


def adamw_settings(section: OptimizeSection) -> dict[str, Any]:
    """Return the arguments of AdamW optimizers."""
    return {
        "lr": section.learning_rate,
        "betas": section.betas,
        "weight_decay": section.weight_decay,
        "eps": section.epsilon,
    }


def make_optimizer(
    parameters: Sequence[nn.Parameter],
    section: OptimizeSection,
    execution: ExecutionSection | None = None,
    *,
    device: torch.device | None = None,
) -> MomentOptimizer:
    """Return the configured optimizer.

    Args:
        parameters: float32.
        execution: placement of a step; None: the defaults.
        device: the device of the models; None: that of the parameters.
    """
    execution = execution or ExecutionSection()
    kind = resolve(OPTIMIZERS, section.optimizer, label="optimize.optimizer")

    def make(some: Sequence[nn.Parameter]) -> MomentOptimizer:
        optimizer: MomentOptimizer = kind(some, section)
        return optimizer

    if device is None or device.type == "cpu" or execution.offload in (False, True):
        return make(parameters)
    from flowmill.tasks.training.optimizer_placement import PlacedOptimizer

    return PlacedOptimizer(parameters, make, device, resting=execution.moments_in_host)


def check_optimizer(config: RunConfig) -> None:
    """Check that the optimizer exists and its libraries are installed."""
    resolve(OPTIMIZERS, config.optimize.optimizer, label="optimize.optimizer")
