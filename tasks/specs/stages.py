"""The table of stages: name, version, artifact, scope, and the class that has options, inputs and work of a stage.

Lists of stages elsewhere (flows, commands, retention, docs) are derived from this table. It imports nothing heavy. A
new stage is one file in ``flowmill.tasks.stages`` and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowmill.configs.errors import ConfigError
from flowmill.configs.suggestions import did_you_mean

Scope = Literal["run", "epoch", "evaluation", "export"]
"""Once per run (epoch 0), once per trained epoch (1 and later), with each evaluation, or with an export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, as data."""

    name: str
    """Name in commands, lineage, metrics and fingerprints."""
    stage: str
    """Import string of its ``flowmill.tasks.stages.stage.Stage``."""
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
    with_data: bool | None = None
    """True for a stage of runs with a section ``data`` alone, False for one of runs without; None: all have it."""
    data_stage: str = ""
    """Import string of the stage in runs with a section ``data``, if it is another class."""
    grows: bool = False
    """True for a cache that is never complete and has no manifest."""


_SPECS = (
    StageSpec(name="base", stage="flowmill.tasks.stages.base:BaseStage", artifact="bases", scope="run", slotted=True),
    # 3: rows are read where they lie, bfloat16 as it is.
    StageSpec(
        name="encode",
        stage="flowmill.tasks.stages.encode:EncodeStage",
        artifact="embeddings",
        scope="run",
        version=3,
        grows=True,
    ),
    StageSpec(
        name="preprocess", stage="flowmill.tasks.stages.preprocess:PreprocessStage", artifact="prompts", scope="run"
    ),
    StageSpec(
        name="ingest",
        stage="flowmill.tasks.stages.ingest:IngestStage",
        artifact="trajectories",
        scope="run",
        slotted=True,
        with_data=True,
    ),
    StageSpec(name="policy", stage="flowmill.tasks.stages.policy:PolicyStage", artifact="policies", scope="run"),
    StageSpec(
        name="choose",
        stage="flowmill.tasks.stages.choose:ChooseStage",
        artifact="choices",
        scope="epoch",
        with_data=False,
    ),
    StageSpec(
        name="rollout",
        stage="flowmill.tasks.stages.rollout:RolloutStage",
        artifact="trajectories",
        scope="epoch",
        slotted=True,
        with_data=False,
    ),
    StageSpec(
        name="render",
        stage="flowmill.tasks.stages.render:RenderStage",
        artifact="renders",
        scope="epoch",
        slotted=True,
        renders=True,
    ),
    StageSpec(
        name="score",
        stage="flowmill.tasks.stages.score:ScoreStage",
        artifact="rewards",
        scope="epoch",
        slotted=True,
        with_data=False,
    ),
    StageSpec(
        name="value", stage="flowmill.tasks.stages.value:ValueStage", artifact="values", scope="epoch", with_data=False
    ),
    StageSpec(
        name="gradient",
        stage="flowmill.tasks.stages.gradient:GradientStage",
        artifact="gradients",
        scope="epoch",
        slotted=True,
        with_data=False,
    ),
    # 2: the KL enters GDPO and running statistics, which follow floor and unbiased; ranks are taken before clipping.
    StageSpec(
        name="advantage",
        stage="flowmill.tasks.stages.advantage:AdvantageStage",
        data_stage="flowmill.tasks.stages.given_advantages:GivenAdvantageStage",
        artifact="advantages",
        scope="epoch",
        version=2,
    ),
    # 2: replayed rows are clipped around proximal means too; corrected KL scales, biases and weights of algorithms;
    # the loss of float16 training is scaled. 3: before the first update ratios are exactly 1, whatever the rounding;
    # layers with adapters compute with the sum of both.
    StageSpec(
        name="optimize",
        stage="flowmill.tasks.stages.optimize:OptimizeStage",
        artifact="policies",
        scope="epoch",
        version=3,
    ),
    # 2: images alone; scores are artifacts of their own.
    StageSpec(
        name="evaluate",
        stage="flowmill.tasks.stages.evaluate:EvaluateStage",
        artifact="evaluations",
        scope="evaluation",
        version=2,
        slotted=True,
    ),
    StageSpec(
        name="depict",
        stage="flowmill.tasks.stages.render:DepictStage",
        artifact="renders",
        scope="evaluation",
        slotted=True,
        renders=True,
    ),
    StageSpec(
        name="judge",
        stage="flowmill.tasks.stages.judge:JudgeStage",
        artifact="rewards",
        scope="evaluation",
        slotted=True,
    ),
    StageSpec(
        name="validate",
        stage="flowmill.tasks.stages.validate:ValidateStage",
        artifact="losses",
        scope="evaluation",
        with_data=True,
    ),
    # 2: a model card, generation.json and images; LoRA files of sorted keys; pipelines that load without arguments.
    # 3: LoRA tensors with alpha / rank folded in; images to start from upright.
    StageSpec(
        name="export", stage="flowmill.tasks.stages.export:ExportStage", artifact="exports", scope="export", version=3
    ),
)
STAGES = {spec.name: spec for spec in _SPECS}
"""All stages by name, in the order of the pipeline."""


def stage_spec(name: str) -> StageSpec:
    """Return a stage of the table."""
    if name not in STAGES:
        raise ConfigError(f"stage '{name}' does not exist. {did_you_mean(name, STAGES)}")
    return STAGES[name]


def names_of(*scopes: Scope) -> tuple[str, ...]:
    """Return the names of the stages of some scopes, in the order of the pipeline."""
    return tuple(spec.name for spec in STAGES.values() if spec.scope in scopes)
