"""AdamW with one byte per moment value (torchao's, after Dettmers et al., arxiv.org/abs/2110.02861)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from flowmill.configs.extras import require_extra
from flowmill.configs.schema import OptimizeSection
from flowmill.models.weights.sharding import spread_like
from flowmill.tasks.training.optimizers import adamw_settings

require_extra("8bit", "torchao", label="optimize.optimizer 'adamw8bit'")
from torchao.optim import AdamW8bit as TorchaoAdamW8bit  # type: ignore[import-untyped]  # noqa: E402
from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-untyped]  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Values that share a scale: at most (as in bitsandbytes) and at least (below it, scales take too much memory).
_LARGEST, _SMALLEST = 256, 16
#: Parameters with fewer numbers keep float32 moments, as in bitsandbytes.
_FEWEST = 4096


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """torchao's AdamW8bit with blocks that end at row ends, so ranks that share rows round like one process."""

    moment_bytes = 1 + 4 / _LARGEST
    step_bytes = 0

    def __init__(self, parameters: Sequence[nn.Parameter], section: OptimizeSection) -> None:
        super().__init__(parameters, **adamw_settings(section))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change the parameters. Without an accelerator the step is not compiled: each shape would take seconds."""
        compiled = torch.accelerator.is_available()
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            value: float | None = super().step(closure)
        return value

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.param_groups:
            group["lr"].fill_(rate)

    @torch.no_grad()
    def begin(self, parameter: nn.Parameter) -> None:
        """Create the initial moments of a parameter."""
        self.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": self._new_buffer(parameter, True),
            "exp_avg_sq": self._new_buffer(parameter, False),
        }

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, by kind, as stored; empty before its first step.

        An 8-bit moment is stored as ``codes`` (uint8, the parameter's shape) and ``scale`` (float32, (rows, blocks)).
        """
        moments: dict[str, Tensor] = {}
        for kind, value in self.state.get(parameter, {}).items():
            state = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(state, OptimState8bit):
                moments[kind] = value
                continue
            rows = parameter.shape[0]
            scale = state.scale.view(state.codes.shape[0], -1)
            moments[f"{kind}.codes"] = spread_like(value, state.codes, parameter.shape)
            moments[f"{kind}.scale"] = spread_like(value, scale, torch.Size((rows, scale.shape[1])))
        return moments

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Return zeros for one moment of a parameter, in 8 bits if its rows divide into blocks."""
        part = p.to_local() if isinstance(p, DTensor) else p
        block = block_size(p.shape)
        if block is None:
            return torch.zeros_like(p)
        buffer: Tensor = OptimState8bit.zeros(part.shape, signed, block, part.device, dtype=p.dtype)
        return spread_like(p, buffer, p.shape)


def block_size(shape: torch.Size) -> int | None:
    """Return the number of values that share a scale: a power of two that divides a row; None: float32."""
    if len(shape) < 2 or shape.numel() < _FEWEST:
        return None
    row, block = shape[1:].numel(), _LARGEST
    while row % block:
        block //= 2
    return block if block >= _SMALLEST else None
