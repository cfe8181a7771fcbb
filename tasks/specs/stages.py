"""The table of stages: name, version, artifact, scope, and the class that has options, inputs and work of a stage.

Lists of stages elsewhere (flows, commands, retention, docs) are derived from this table. It imports nothing heavy. A
new stage is one file in ``flowmill.tasks.stages`` and one entry here.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from flowmill.configs.errors import ConfigError
from flowmill.configs.suggestions import did_you_mean

Scope = Literal["run", "epoch", "evaluation", "export"]
"""Once per run (epoch 0), once per trained epoch (1 and later), with each evaluation, or with an export."""


@dataclass(frozen=True, slots=True)
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
    _: KW_ONLY
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
    StageSpec("base", "flowmill.tasks.stages.base:BaseStage", "bases", "run", slotted=True),
    # 3: rows are read where they lie, bfloat16 as it is.
    StageSpec("encode", "flowmill.tasks.stages.encode:EncodeStage", "embeddings", "run", version=3, grows=True),
    StageSpec("preprocess", "flowmill.tasks.stages.preprocess:PreprocessStage", "prompts", "run"),
    StageSpec(
        "ingest", "flowmill.tasks.stages.ingest:IngestStage", "trajectories", "run", slotted=True, with_data=True
    ),
    StageSpec("policy", "flowmill.tasks.stages.policy:PolicyStage", "policies", "run"),
    StageSpec("choose", "flowmill.tasks.stages.choose:ChooseStage", "choices", "epoch", with_data=False),
    StageSpec(
        "rollout", "flowmill.tasks.stages.rollout:RolloutStage", "trajectories", "epoch", slotted=True, with_data=False
    ),
    StageSpec("render", "flowmill.tasks.stages.render:RenderStage", "renders", "epoch", slotted=True, renders=True),
    StageSpec("score", "flowmill.tasks.stages.score:ScoreStage", "rewards", "epoch", slotted=True, with_data=False),
    StageSpec("value", "flowmill.tasks.stages.value:ValueStage", "values", "epoch", with_data=False),
    StageSpec(
        "gradient", "flowmill.tasks.stages.gradient:GradientStage", "gradients", "epoch", slotted=True, with_data=False
    ),
    # 2: the KL enters GDPO and running statistics, which follow floor and unbiased; ranks are taken before clipping.
    StageSpec(
        "advantage",
        "flowmill.tasks.stages.advantage:AdvantageStage",
        "advantages",
        "epoch",
        data_stage="flowmill.tasks.stages.given_advantages:GivenAdvantageStage",
        version=2,
    ),
    # 2: replayed rows are clipped around proximal means too; corrected KL scales, biases and weights of algorithms;
    # the loss of float16 training is scaled. 3: before the first update ratios are exactly 1, whatever the rounding;
    # layers with adapters compute with the sum of both.
    StageSpec("optimize", "flowmill.tasks.stages.optimize:OptimizeStage", "policies", "epoch", version=3),
    # 2: images alone; scores are artifacts of their own.
    StageSpec(
        "evaluate", "flowmill.tasks.stages.evaluate:EvaluateStage", "evaluations", "evaluation", version=2, slotted=True
    ),
    StageSpec(
        "depict", "flowmill.tasks.stages.render:DepictStage", "renders", "evaluation", slotted=True, renders=True
    ),
    StageSpec("judge", "flowmill.tasks.stages.judge:JudgeStage", "rewards", "evaluation", slotted=True),
    StageSpec("validate", "flowmill.tasks.stages.validate:ValidateStage", "losses", "evaluation", with_data=True),
    # 2: a model card, generation.json and images; LoRA files of sorted keys; pipelines that load without arguments.
    # 3: LoRA tensors with alpha / rank folded in; images to start from upright.
    StageSpec("export", "flowmill.tasks.stages.export:ExportStage", "exports", "export", version=3),
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
