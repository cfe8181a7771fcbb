"""Samplers of prompts: which prompts an epoch trains on. A sampler is one file and one entry of the table."""

from flowmill.configs.registry import Table

SAMPLERS = Table(
    {
        "permutation": "flowmill.tasks.choices.permutation:Permutation",
        "difficulty": "flowmill.tasks.choices.difficulty:Difficulty",
        "informative": "flowmill.tasks.choices.informative:Informative",
        "sources": "flowmill.tasks.choices.sources:Sources",
    },
    like="flowmill.tasks.choices.base:PromptSampler",
)
