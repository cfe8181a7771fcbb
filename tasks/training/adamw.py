"""AdamW (Loshchilov and Hutter, arxiv.org/abs/1711.05101), from torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowmill.configs.schema import OptimizeSection
from flowmill.tasks.training.optimizers import adamw_settings


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with float32 moments."""

    moment_bytes = 4.0
    step_bytes = 4

    def __init__(self, parameters: Sequence[nn.Parameter], section: OptimizeSection) -> None:
        super().__init__(parameters, **adamw_settings(section))

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def begin(self, parameter: nn.Parameter) -> None:
        """Create the initial moments of a parameter."""
        self.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, by kind, as stored; empty before its first step."""
        return dict(self.state.get(parameter, {}))
