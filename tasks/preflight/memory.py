"""What a run needs of a GPU, phase by phase: parameters and memory per rank, from the model's architecture alone."""

from __future__ import annotations

from configs.registry import resolve
from configs.schema import RunConfig
from tasks.inputs.components import make_algorithm
from tasks.kinds.kind import make_kind
from tasks.kinds.memory import Memory, OptimizerSizes
from tasks.optimize.optimizers import OPTIMIZERS


def estimate_memory(config: RunConfig, *, reference: bool) -> Memory | None:
    """Return what a rank needs, or None while the architecture is not known (a model to build, or not published here).

    Args:
        config: a config that was checked.
        reference: the base model is compared with.
    """
    requires = make_algorithm(config).requires
    return make_kind(config).memory(config, requires, optimizer_sizes(config), reference=reference)


def optimizer_sizes(config: RunConfig) -> OptimizerSizes:
    """Return what of the configured optimizer decides how much memory training takes."""
    optimizer = resolve(OPTIMIZERS, config.optimize.optimizer, what="optimize.optimizer")
    return OptimizerSizes(moment_bytes=optimizer.moment_bytes, fuses=optimizer.fuses)
