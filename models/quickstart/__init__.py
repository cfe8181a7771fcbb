"""The quickstart's base models: tiny real StableDiffusion3Pipelines, pre-trained from nothing in under two minutes.

A builder writes a diffusers folder; adding one is a function in ``build.py`` and a line in the table.
"""

from __future__ import annotations

from configs.registry import Table

BUILDERS = Table(
    {
        "addition": "models.quickstart.addition:AdditionBuilder",
        "digits": "models.quickstart.build:DigitsBuilder",
        "words": "models.quickstart.build:WordsBuilder",
        "smollm": "models.quickstart.smollm:SmolLMBuilder",
        "tiny": "models.quickstart.tiny:TinyBuilder",
    },
    like="models.quickstart.base:Builder",
)
