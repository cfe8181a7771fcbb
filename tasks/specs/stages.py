"""The table of stages: name, version, artifact, scope, and the class that has options, inputs and work of a stage.

Lists of stages elsewhere (flows, commands, retention, docs) are derived from this table. It imports nothing heavy. A
new stage is one file in ``tasks.stages`` and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.errors import ConfigError
from configs.suggestions import did_you_mean

Scope = Literal["run", "epoch", "evaluation", "export"]
"""Once per run (epoch 0), once per trained epoch (1 and later), with each evaluation, or with an export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, as data."""

    name: str
    """Name in commands, lineage, metrics and fingerprints."""
    stage: str
    """Import string of its ``tasks.stages.stage.Stage``."""
    artifact: str
    """Kind of the artifact it makes."""
    scope: Scope
    """Epochs that have it."""
    version: int = 1
    """Raised when the meaning of the stage's output changes."""
    slotted: bool = False
    """True where an epoch may have several: one for each reward, model, evaluation or turn."""
    renders: bool = False
    """True where it renders texts, in runs with a section ``render``."""
    given: bool | None = None
    """True for a stage of runs with a section ``data`` alone, False for one of runs without; None: all have it."""
    given_stage: str = ""
    """Import string of the stage in runs with a section ``data``, if it is another class."""
    directs: bool = False
    """True where later stages read other artifacts depending on its content."""
    grows: bool = False
    """True for a cache that is never complete and has no manifest."""


_SPECS = (
    StageSpec(name="base", stage="tasks.stages.base:BaseStage", artifact="bases", scope="run", slotted=True),
    # 3: rows are read where they lie, bfloat16 as it is.
    StageSpec(
        name="encode",
        stage="tasks.stages.encode:EncodeStage",
        artifact="embeddings",
        scope="run",
        version=3,
        grows=True,
    ),
    StageSpec(name="preprocess", stage="tasks.stages.preprocess:PreprocessStage", artifact="prompts", scope="run"),
    StageSpec(
        name="ingest",
        stage="tasks.stages.ingest:IngestStage",
        artifact="trajectories",
        scope="run",
        slotted=True,
        given=True,
    ),
    StageSpec(name="policy", stage="tasks.stages.policy:PolicyStage", artifact="policies", scope="run"),
    StageSpec(name="choose", stage="tasks.stages.choose:ChooseStage", artifact="choices", scope="epoch", given=False),
    StageSpec(
        name="rollout",
        stage="tasks.stages.rollout:RolloutStage",
        artifact="trajectories",
        scope="epoch",
        slotted=True,
        given=False,
    ),
    StageSpec(
        name="render",
        stage="tasks.stages.render:RenderStage",
        artifact="renders",
        scope="epoch",
        slotted=True,
        renders=True,
    ),
    StageSpec(
        name="score",
        stage="tasks.stages.score:ScoreStage",
        artifact="rewards",
        scope="epoch",
        slotted=True,
        given=False,
    ),
    StageSpec(name="value", stage="tasks.stages.value:ValueStage", artifact="values", scope="epoch", given=False),
    StageSpec(
        name="gradient",
        stage="tasks.stages.gradient:GradientStage",
        artifact="gradients",
        scope="epoch",
        slotted=True,
        given=False,
    ),
    # 2: the KL enters GDPO and running statistics, which follow floor and unbiased; ranks are taken before clipping.
    StageSpec(
        name="advantage",
        stage="tasks.stages.advantage:AdvantageStage",
        given_stage="tasks.stages.given_advantages:GivenAdvantageStage",
        artifact="advantages",
        scope="epoch",
        version=2,
    ),
    # 2: replayed rows are clipped around proximal means too; corrected KL scales, biases and weights of algorithms;
    # the loss of float16 training is scaled. 3: before the first update ratios are exactly 1, whatever the rounding;
    # layers with adapters compute with the sum of both.
    StageSpec(
        name="optimize", stage="tasks.stages.optimize:OptimizeStage", artifact="policies", scope="epoch", version=3
    ),
    StageSpec(name="steer", stage="tasks.stages.steer:SteerStage", artifact="decisions", scope="epoch", directs=True),
    # 2: images alone; scores are artifacts of their own.
    StageSpec(
        name="evaluate",
        stage="tasks.stages.evaluate:EvaluateStage",
        artifact="evaluations",
        scope="evaluation",
        version=2,
        slotted=True,
    ),
    StageSpec(
        name="depict",
        stage="tasks.stages.render:DepictStage",
        artifact="renders",
        scope="evaluation",
        slotted=True,
        renders=True,
    ),
    StageSpec(
        name="judge", stage="tasks.stages.judge:JudgeStage", artifact="rewards", scope="evaluation", slotted=True
    ),
    StageSpec(
        name="validate", stage="tasks.stages.validate:ValidateStage", artifact="losses", scope="evaluation", given=True
    ),
    # 2: a model card, generation.json and images; LoRA files of sorted keys; pipelines that load without arguments.
    # 3: LoRA tensors with alpha / rank folded in; images to start from upright.
    StageSpec(name="export", stage="tasks.stages.export:ExportStage", artifact="exports", scope="export", version=3),
)
STAGES = {spec.name: spec for spec in _SPECS}
"""All stages by name, in the order of the pipeline."""


def stage_spec(name: str) -> StageSpec:
    """Return a stage of the table.

    Raises:
        ConfigError: there is no such stage.
    """
    if name not in STAGES:
        raise ConfigError(f"stage '{name}' does not exist. {did_you_mean(name, STAGES)}")
    return STAGES[name]


def names_of(*scopes: Scope) -> tuple[str, ...]:
    """Return the names of the stages of some scopes, in the order of the pipeline."""
    return tuple(spec.name for spec in STAGES.values() if spec.scope in scopes)
