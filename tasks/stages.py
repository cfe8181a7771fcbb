"""The table of stages, in the order of the pipeline."""

from __future__ import annotations

from configs.errors import ConfigError
from configs.registry import resolve
from tasks.stage import Stage
from tasks.workspace import Workspace

STAGES = {
    "base": "tasks.base:BaseStage",
    "encode": "tasks.preprocess:EncodeStage",
    "preprocess": "tasks.preprocess:PreprocessStage",
    "policy": "tasks.policy:PolicyStage",
    "rollout": "tasks.rollout:RolloutStage",
    "score": "tasks.score:ScoreStage",
    "advantage": "tasks.advantage:AdvantageStage",
    "optimize": "tasks.optimize.stage:OptimizeStage",
    "evaluate": "tasks.evaluate:EvaluateStage",
    "judge": "tasks.score:JudgeStage",
    "export": "tasks.export.stage:ExportStage",
}
#: Stages that belong to the run as a whole.
ONCE = ("base", "encode", "preprocess", "policy")
#: Stages of which an epoch may have several.
SLOTTED = ("score", "evaluate", "judge")
#: Stages that make images.
DECODING = ("rollout", "evaluate")
#: Stages that make sense for epoch 1 and later only.
TRAINING = ("rollout", "score", "advantage", "optimize")


def make_stage(workspace: Workspace, name: str, epoch: int, slot: str = "") -> Stage:
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
        return cls(workspace, epoch, slot)  # type: ignore[no-any-return]
    return cls(workspace, epoch)  # type: ignore[no-any-return]
