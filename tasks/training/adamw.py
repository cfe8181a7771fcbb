"""AdamW (Loshchilov and Hutter, arxiv.org/abs/1711.05101), from torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flowmill.configs.schema import OptimizeSection
from flowmill.tasks.training.optimizers import adamw_settings

if TYPE_CHECKING:
    from torch import Tensor, nn


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with float32 moments."""

    moment_bytes = 4.0
    fuses = True

    def __init__(self, parameters: Sequence[nn.Parameter], section: OptimizeSection, *, fused: bool) -> None:
        """Bind to parameters.

        Args:
            parameters: float32.
            section: the settings.
            fused: run a step as one kernel.
        """
        super().__init__(parameters, **adamw_settings(section), fused=fused or None)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def begin(self, parameter: nn.Parameter) -> None:
        """Create the initial moments of a parameter."""
        # A fused optimizer counts its steps on the device, the others on the CPU.
        counted_on = parameter.device if self.defaults["fused"] else torch.device("cpu")
        self.state[parameter] = {
            "step": torch.zeros((), device=counted_on),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, by kind, as stored; empty before its first step."""
        return dict(self.state.get(parameter, {}))
