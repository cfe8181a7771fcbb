"""Device memory of a run for any kind of policy: the interface of estimates, and their shared parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from configs.execution import ExecutionSection
from configs.schema import RunConfig

#: Bytes per value by dtype.
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes per trained value, and per value of its gradient and copies: all float32.
MASTER = 4
#: Blocks that ``fully_shard`` gathers at a time: the active one and the next.
WHOLE_BLOCKS = 2
#: Name of reward models in accounts.
REWARD_MODELS = "models of rewards"
#: Micro-batches in host memory while training: the active one and the prefetched ones.
READ_AHEAD = 3
#: Maximum values per optimizer step group if parameters or moments are in host memory; a larger parameter is alone.
AT_A_TIME = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """Sizes of an optimizer's state."""

    moment_bytes: float
    """Bytes per value of one moment."""
    fuses: bool
    """``execution.fused_adamw`` has an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingMemory:
    """Memory of a frozen model that renders texts, in bytes."""

    weights: int
    """Text encoders, denoisers and autoencoder."""
    work: int
    """Activations of a forward or of decoding."""


class Memory(Protocol):
    """Estimates for one rank, in bytes."""

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""

    @property
    def trained(self) -> int:
        """Trained parameters: adapters, or all."""

    @property
    def tokens(self) -> int:
        """Tokens of one row."""

    @property
    def phases(self) -> Mapping[str, int]:
        """Memory of each phase."""

    @property
    def lines(self) -> Mapping[str, Mapping[str, int]]:
        """The parts of the memory by label and phase, without empty phases."""

    @property
    def between(self) -> int:
        """Device memory that stays in use while samples are scored."""

    @property
    def host(self) -> Mapping[str, int]:
        """Host memory by content, the maximum of one rank."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Omissions of the estimate, a sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""

    def advice(self, config: RunConfig, limit: int) -> list[str]:
        """Return changes that make a run fit ``limit`` bytes per GPU; empty when it does."""

    def less_between(self, config: RunConfig) -> str:
        """Return changes that free memory while samples are scored; '' if none of it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Placement of a rank's trained state, in bytes."""

    weights: int
    """On the device."""
    state: int
    """Gradients, moments and averages on the device."""
    host: int
    """In host memory."""
    pinned: int
    """The pinned part of it: parameters and gradients, and moments that move to the device for a step."""
    saved: int
    """Gradients, moments and averages, on the device or in host memory."""

    @classmethod
    def of(
        cls, execution: ExecutionSection, optimizer: OptimizerSizes, *, weights: int, trained: int, copies: int
    ) -> Placed:
        """Return the placement under ``execution.offload``.

        Args:
            execution: the section.
            optimizer: sizes of the optimizer's state.
            weights: bytes of all weights, over all ranks.
            trained: number of trained values.
            copies: float32 copies of the trained values next to the weights: gradients and averages.
        """
        parts, moments = execution.holders, 2 * optimizer.moment_bytes * trained
        own, saved, rest = weights // parts, int(trained * MASTER * copies + moments) // parts, int(moments) // parts
        given = own + trained * MASTER // parts
        if not execution.offload:
            return cls(weights=own, state=saved, host=0, pinned=0, saved=saved)
        if execution.offload is True:
            return cls(weights=0, state=0, host=own + saved, pinned=given, saved=saved)
        if execution.parameters_in_host:
            return cls(weights=0, state=rest, host=own + saved - rest, pinned=given, saved=saved)
        return cls(weights=own, state=saved - rest, host=rest, pinned=rest, saved=saved)

    @property
    def lines(self) -> Mapping[str, int]:
        """Its host memory by label."""
        return {"offloaded, pinned": self.pinned, "offloaded": self.host - self.pinned}


def step_bytes(config: RunConfig, trained: int, parts: int, optimizer: OptimizerSizes) -> int:
    """Return the bytes of the gradient exchange and the optimizer's step, after activations are freed.

    Args:
        config: the config.
        trained: number of trained values.
        parts: ranks that the values are sharded over.
        optimizer: sizes of the optimizer's state.
    """
    execution = config.execution
    # With ddp the gradient exchange uses one buffer.
    exchange = trained * MASTER if execution.ranks > 1 and execution.strategy == "ddp" else 0
    fusing = MASTER if optimizer.fuses and not execution.fused_adamw else 0
    if not execution.offload:
        return exchange + trained * fusing // parts
    if execution.offload is True:
        return 0
    brought = 2 * (MASTER if execution.parameters_in_host else optimizer.moment_bytes)
    return exchange + int(min(trained // parts, AT_A_TIME) * (fusing + brought))


def less_to_sample(config: RunConfig) -> str:
    """Return remedies if the weights alone do not fit while sampling."""
    execution = config.execution
    if execution.sampling == "spread":
        return "take more or larger GPUs"
    if execution.strategy == "fsdp":
        return "set execution.sampling=spread"
    return "set execution.strategy=fsdp and execution.sampling=spread" if execution.ranks > 1 else "take a larger GPU"
