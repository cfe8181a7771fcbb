"""Number of tokens per row, for a model of known architecture."""

from __future__ import annotations

import math

from flowmill.models.memory.published import Architecture
from flowmill.tasks.inputs.resolved import ResolvedConfig


def text_tokens(plan: ResolvedConfig, architecture: Architecture) -> int:
    """Return the number of text tokens of a row, which follows ``model.options.max_sequence_length``."""
    if not architecture.text_tokens:
        return 0
    length = getattr(plan.model_options, "max_sequence_length", None)
    return architecture.text_tokens if length is None else int(length) + architecture.further_text


def image_tokens(plan: ResolvedConfig, architecture: Architecture) -> int:
    """Return the maximum number of tokens of a row without text: of the generated image and those it starts from."""
    model, references = plan.config.model, 0
    if plan.family_spec.references is not None:
        options = plan.model_options
        references = options.references * options.reference_area
    elif plan.family_spec.starts_from == "image" and hasattr(plan.model_options, "condition_area"):
        references = math.prod(plan.family.condition_size(plan.model_options, model.width / model.height))
    return architecture.tokens(height=model.height, width=model.width, frames=model.frames, references=references)
