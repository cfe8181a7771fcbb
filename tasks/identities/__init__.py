"""What each stage is: its name and version, the options that change its result, and what it reads.

An identity decides which artifact a stage makes, so status, staleness and lineage need no more than this room. How the
artifact is made is ``tasks.stages``'s. A new stage is one file here, one there, and a line in both tables.
"""

from __future__ import annotations

from configs.registry import Table

IDENTITIES = Table(
    {
        "base": "tasks.identities.base:BaseIdentity",
        "encode": "tasks.identities.encode:EncodeIdentity",
        "preprocess": "tasks.identities.preprocess:PreprocessIdentity",
        "policy": "tasks.identities.policy:PolicyIdentity",
        "rollout": "tasks.identities.rollout:RolloutIdentity",
        "render": "tasks.identities.render:RenderIdentity",
        "score": "tasks.identities.score:ScoreIdentity",
        "value": "tasks.identities.value:ValueIdentity",
        "gradient": "tasks.identities.gradient:GradientIdentity",
        "advantage": "tasks.identities.advantage:AdvantageIdentity",
        "optimize": "tasks.identities.optimize:OptimizeIdentity",
        "evaluate": "tasks.identities.evaluate:EvaluateIdentity",
        "depict": "tasks.identities.render:DepictIdentity",
        "judge": "tasks.identities.judge:JudgeIdentity",
        "export": "tasks.identities.export:ExportIdentity",
    },
    like="tasks.identities.identity:Identity",
)
