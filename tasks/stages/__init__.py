"""The table of stages, in the order of the pipeline."""

from __future__ import annotations

from configs.errors import ConfigError
from configs.registry import Table, resolve
from tasks.context import RunContext
from tasks.stage import Stage

STAGES = Table(
    {
        "base": "tasks.stages.base:BaseStage",
        "encode": "tasks.stages.encode:EncodeStage",
        "preprocess": "tasks.stages.preprocess:PreprocessStage",
        "policy": "tasks.stages.policy:PolicyStage",
        "rollout": "tasks.stages.rollout:RolloutStage",
        "score": "tasks.stages.score:ScoreStage",
        "advantage": "tasks.stages.advantage:AdvantageStage",
        "optimize": "tasks.stages.optimize:OptimizeStage",
        "evaluate": "tasks.stages.evaluate:EvaluateStage",
        "judge": "tasks.stages.score:JudgeStage",
        "export": "tasks.stages.export:ExportStage",
    },
    like="tasks.stage:Stage",
)
#: Stages that belong to the run as a whole.
ONCE = ("base", "encode", "preprocess", "policy")
#: Stages of which an epoch may have several.
SLOTTED = ("score", "evaluate", "judge")
#: Stages that make sense for epoch 1 and later only.
TRAINING = ("rollout", "score", "advantage", "optimize")


def make_stage(context: RunContext, name: str, epoch: int, slot: str = "") -> Stage:
    """Return a stage of a run.

    Raises:
        ConfigError: there is no such stage, or it does not exist for this epoch or slot.
    """
    cls = resolve(STAGES, name, what="stage")
    if name in ONCE and epoch != 0:
        raise ConfigError(f"Stage '{name}' runs once per run; leave --epoch out.")
    if name in TRAINING and epoch < 1:
        raise ConfigError(f"Stage '{name}' runs once per epoch. Say which with --epoch 1 or later.")
    if name in SLOTTED:
        return cls(context, epoch, slot)  # type: ignore[no-any-return]
    return cls(context, epoch)  # type: ignore[no-any-return]
