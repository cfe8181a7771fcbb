"""How each stage makes its artifact: the contract, its one execution, and one file per stage, in pipeline order."""

from __future__ import annotations

from configs.registry import Table

STAGES = Table(
    {
        "base": "tasks.stages.base:BaseStage",
        "encode": "tasks.stages.encode:EncodeStage",
        "preprocess": "tasks.stages.preprocess:PreprocessStage",
        "policy": "tasks.stages.policy:PolicyStage",
        "rollout": "tasks.stages.rollout:RolloutStage",
        "render": "tasks.stages.render:RenderStage",
        "score": "tasks.stages.score:ScoreStage",
        "value": "tasks.stages.value:ValueStage",
        "gradient": "tasks.stages.gradient:GradientStage",
        "advantage": "tasks.stages.advantage:AdvantageStage",
        "optimize": "tasks.stages.optimize:OptimizeStage",
        "evaluate": "tasks.stages.evaluate:EvaluateStage",
        "depict": "tasks.stages.render:DepictStage",
        "judge": "tasks.stages.judge:JudgeStage",
        "export": "tasks.stages.export:ExportStage",
    },
    like="tasks.stages.stage:Stage",
)
