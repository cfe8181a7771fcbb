"""Number of tokens per row, for a model of known architecture."""

from __future__ import annotations

from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import build as make_options
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.published import Architecture
from flowmill.models.policies import POLICIES


def text_tokens(config: RunConfig, architecture: Architecture) -> int:
    """Return the number of text tokens of a row, which follows ``model.options.max_sequence_length``."""
    if not architecture.text_tokens:
        return 0
    family = resolve(POLICIES, config.model.policy, label="model.policy")
    options = make_options(family.options_type, config.model.policy, config.model.options, label="model.options of")
    length = getattr(options, "max_sequence_length", None)
    return architecture.text_tokens if length is None else int(length) + architecture.further_text


def image_tokens(config: RunConfig, architecture: Architecture) -> int:
    """Return the maximum number of tokens of a row without text: of the generated image and its references."""
    model, references = config.model, 0
    if spec_of(model.policy).references is not None:
        family = resolve(POLICIES, model.policy, label="model.policy")
        options = make_options(family.options_type, model.policy, model.options, label="model.options of")
        references = options.references * options.reference_area
    return architecture.tokens(height=model.height, width=model.width, frames=model.frames, references=references)
