"""The quickstart's base models: tiny real pipelines and language models, pre-trained from scratch in minutes.

A builder writes a folder of diffusers or transformers; a new one is a class and a line in the table.
"""

from __future__ import annotations

from configs.registry import Table

BUILDERS = Table(
    {
        "addition": "models.quickstart.addition:AdditionBuilder",
        "digit_edits": "models.quickstart.edits:DigitEditsBuilder",
        "digit_enhancer": "models.quickstart.vision:DigitEnhancerBuilder",
        "digit_sums": "models.quickstart.vision:DigitSumsBuilder",
        "digits": "models.quickstart.build:DigitsBuilder",
        "looker": "models.quickstart.looker:LookerBuilder",
        "reviser": "models.quickstart.rewriter:ReviserBuilder",
        "rewriter": "models.quickstart.rewriter:RewriterBuilder",
        "words": "models.quickstart.build:WordsBuilder",
        "smollm": "models.quickstart.smollm:SmolLMBuilder",
        "unified_digits": "models.quickstart.unified:UnifiedDigitsBuilder",
        "tiny": "models.quickstart.tiny:TinyBuilder",
    },
    like="models.quickstart.base:Builder",
)
