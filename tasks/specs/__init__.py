"""What each stage is: its name and version, the options that change its result, and what it reads.

An identity decides which artifact a stage makes, so status, staleness and lineage need no more than this room. How the
artifact is made is ``tasks.stages``'s. A new stage is one file here, one there, and a line in both tables.
"""

from __future__ import annotations

from configs.registry import Table

SPECS = Table(
    {
        "base": "tasks.specs.base:BaseSpec",
        "encode": "tasks.specs.encode:EncodeSpec",
        "preprocess": "tasks.specs.preprocess:PreprocessSpec",
        "policy": "tasks.specs.policy:PolicySpec",
        "rollout": "tasks.specs.rollout:RolloutSpec",
        "render": "tasks.specs.render:RenderSpec",
        "score": "tasks.specs.score:ScoreSpec",
        "value": "tasks.specs.value:ValueSpec",
        "gradient": "tasks.specs.gradient:GradientSpec",
        "advantage": "tasks.specs.advantage:AdvantageSpec",
        "optimize": "tasks.specs.optimize:OptimizeSpec",
        "evaluate": "tasks.specs.evaluate:EvaluateSpec",
        "depict": "tasks.specs.render:DepictSpec",
        "judge": "tasks.specs.judge:JudgeSpec",
        "export": "tasks.specs.export:ExportSpec",
    },
    like="tasks.specs.base_spec:StageSpec",
)
