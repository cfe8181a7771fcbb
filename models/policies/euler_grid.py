"""Families whose pipelines have a multistep solver: rollouts use the Euler grid with the same flow shift.

UniPC and DPM-Solver combine several noise levels in a step and round their timesteps, so a single step has no
log-prob; every public trainer samples with Euler instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from flowmill.models.policies.diffusion import PipelineCall, SchedulerChoice
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.pipeline_configs import SHIFT_ALONE, UNIPC_FLOW, Fields

if TYPE_CHECKING:
    from torch import Tensor


class _Shifted(Protocol):
    """Options with a flow shift."""

    @property
    def flow_shift(self) -> float | None:
        """Shift of the noise levels; the pipeline's when absent."""


class EulerGridPolicy(PipelinePolicy):
    """Adapter for a pipeline whose scheduler is replaced by Euler."""

    options: _Shifted
    schedulers: ClassVar[Mapping[str, Fields]] = {
        "UniPCMultistepScheduler": UNIPC_FLOW,
        "FlowMatchEulerDiscreteScheduler": SHIFT_ALONE,
    }

    def sigmas(self, steps: int) -> Tensor:
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(shift=self._shift)
        scheduler.set_timesteps(steps, device=self.settings.device)
        return scheduler.sigmas.clone().float()

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments and the Euler scheduler: its own multistep scheduler draws other samples."""
        euler = SchedulerChoice(name="FlowMatchEulerDiscreteScheduler", options={"shift": self._shift})
        return replace(super().pipeline_call(steps, negative_prompt), scheduler=euler)

    @property
    def _shift(self) -> float:
        config = self.pipeline.scheduler.config
        return float(self.options.flow_shift or config.get("flow_shift") or config.get("shift") or 1.0)
