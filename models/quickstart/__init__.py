"""The quickstart's base models: tiny real pipelines and language models, pre-trained from scratch in minutes.

A builder writes a folder of diffusers or transformers; a new one is a class and a line in the table.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from flowmill.configs.registry import Table

BUILDERS = Table(
    {
        "addition": "flowmill.models.quickstart.addition:AdditionBuilder",
        "digit_edits": "flowmill.models.quickstart.edits:DigitEditsBuilder",
        "digit_enhancer": "flowmill.models.quickstart.vision:DigitEnhancerBuilder",
        "digit_sums": "flowmill.models.quickstart.vision:DigitSumsBuilder",
        "digits": "flowmill.models.quickstart.build:DigitsBuilder",
        "looker": "flowmill.models.quickstart.looker:LookerBuilder",
        "reviser": "flowmill.models.quickstart.rewriter:ReviserBuilder",
        "rewriter": "flowmill.models.quickstart.rewriter:RewriterBuilder",
        "words": "flowmill.models.quickstart.build:WordsBuilder",
        "smollm": "flowmill.models.quickstart.smollm:SmolLMBuilder",
        "unified_digits": "flowmill.models.quickstart.unified:UnifiedDigitsBuilder",
        "tiny": "flowmill.models.quickstart.tiny:TinyBuilder",
    },
    like="flowmill.models.quickstart.base:Builder",
)


@cache
def tiny_families() -> dict[str, dict[str, Any]]:
    """Return the parts of each family's tiny pipeline, see ``tiny.yaml``."""
    table = yaml.safe_load(files("flowmill.models.quickstart").joinpath("tiny.yaml").read_text())
    return {family: parts for family, parts in table.items() if family != "shared"}
