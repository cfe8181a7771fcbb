"""What a person should know about a training config that works: printed by ``flowmill check``, never refused."""

from __future__ import annotations

from configs.schema import RunConfig
from tasks.optimize.rates import learning_rate
from tasks.prompts import uses_guidance


def training_notes(config: RunConfig, *, updates: int) -> list[str]:
    """Return notes on a config of ``updates`` optimizer updates in the whole run."""
    return [note for note in (_guidance(config), _schedule(config, updates)) if note is not None]


def _guidance(config: RunConfig) -> str | None:
    if not uses_guidance(config) or config.optimize.guidance_gradient != "conditional":
        return None
    scale = config.model.guidance_scale
    return (
        f"optimize.guidance_gradient 'conditional' is not the gradient of the log-prob that is replayed: with "
        f"model.guidance_scale {scale:g} its slope is about {scale:g} times too large, and its direction another "
        "(cosine 0.93 on SD3, 0.99 on Qwen-Image). 'both' is exact and takes a backward pass through both halves."
    )


def _schedule(config: RunConfig, updates: int) -> str | None:
    schedule = config.optimize.schedule
    if schedule is None or updates == 0:
        return None
    if schedule.warmup_updates >= updates:
        return (
            f"optimize.schedule.warmup_updates is {schedule.warmup_updates}, but the run has {updates} at most: "
            "the full learning rate is never reached."
        )
    if schedule.total_updates is not None and learning_rate(config.optimize, updates - 1) == 0:
        return (
            f"optimize.schedule.total_updates is {schedule.total_updates}, but the run has up to {updates} updates: "
            "from there on the learning rate is 0 and nothing is learned. Raise it, or set 'final' above 0."
        )
    return None
