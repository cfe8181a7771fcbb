"""What a run needs of a device's memory, whatever its policy makes: what every kind's estimate says, and shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from configs.schema import RunConfig

#: Bytes of a number by dtype.
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes of a trained number, of its gradient, and of copies of it: float32 all.
MASTER = 4
#: Blocks that ``fully_shard`` has whole at a time: the one that computes, and the next.
WHOLE_BLOCKS = 2
#: What models of rewards are called in accounts.
REWARD_MODELS = "models of rewards"
#: Micro-batches in host memory while training: the one at work, and those that are read before they are needed.
READ_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """What of an optimizer decides how much memory training takes."""

    moment_bytes: float
    """Bytes of one moment of one number."""
    fuses: bool
    """``execution.fused_adamw`` does something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingMemory:
    """What a frozen model needs that draws texts, in bytes."""

    weights: int
    """Text encoders, denoisers and autoencoder."""
    work: int
    """Of a forward, or of decoding what it made."""


class Memory(Protocol):
    """Estimates for one rank, in bytes."""

    @property
    def parameters(self) -> int:
        """Of the policy."""

    @property
    def trained(self) -> int:
        """Of what of it is trained: adapters, or all."""

    @property
    def tokens(self) -> int:
        """Tokens of one row."""

    @property
    def phases(self) -> Mapping[str, int]:
        """Memory of every phase."""

    @property
    def lines(self) -> Mapping[str, Mapping[str, int]]:
        """What it consists of, in words, by phase; phases that hold nothing of it are left out."""

    @property
    def between(self) -> int:
        """Of the device, what stays while samples are scored."""

    @property
    def host(self) -> Mapping[str, int]:
        """Host memory, by what is in it, of one rank at most."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the estimate cannot know, a sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""

    def advice(self, config: RunConfig, limit: int) -> list[str]:
        """Return what to change so that a run fits ``limit`` bytes per GPU; empty when it does."""


def step_bytes(config: RunConfig, trained: int, parts: int, optimizer: OptimizerSizes) -> int:
    """Return the bytes that the exchange of gradients and the optimizer's step take, when activations are gone.

    Args:
        config: the config.
        trained: numbers that are trained.
        parts: ranks that hold them together.
        optimizer: which.
    """
    execution = config.execution
    # With ddp gradients are exchanged as one buffer.
    exchange = trained * MASTER if execution.ranks > 1 and execution.strategy == "ddp" else 0
    fusing = optimizer.fuses and not execution.fused_adamw
    return 0 if execution.offload else exchange + (trained * MASTER // parts if fusing else 0)


def less_to_sample(config: RunConfig) -> str:
    """Return what to change where the weights alone do not fit while samples are made."""
    execution = config.execution
    if execution.sampling == "spread":
        return "take more or larger GPUs"
    if execution.strategy == "fsdp":
        return "set execution.sampling=spread"
    return "set execution.strategy=fsdp and execution.sampling=spread" if execution.ranks > 1 else "take a larger GPU"
