"""Samplers of prompts: which prompts an epoch trains on. A sampler is one file and one entry of the table."""

from configs.registry import Table

SAMPLERS = Table(
    {
        "permutation": "tasks.choices.permutation:Permutation",
        "difficulty": "tasks.choices.difficulty:Difficulty",
        "informative": "tasks.choices.informative:Informative",
        "sources": "tasks.choices.sources:Sources",
    },
    like="tasks.choices.base:PromptSampler",
)
