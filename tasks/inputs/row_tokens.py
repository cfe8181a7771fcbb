"""How many tokens a row has, of a model whose architecture is known."""

from __future__ import annotations

from configs.registry import build as make_options
from configs.registry import resolve
from configs.schema import RunConfig
from models.memory.architecture_shapes import Architecture
from models.policies import POLICIES, REFERENCES


def text_tokens(config: RunConfig, architecture: Architecture) -> int:
    """Return the text tokens of a row beside its image's, which follow ``model.options.max_sequence_length``."""
    if not architecture.text_tokens:
        return 0
    family = resolve(POLICIES, config.model.policy, label="model.policy")
    options = make_options(family.options_type, config.model.policy, config.model.options, label="model.options of")
    length = getattr(options, "max_sequence_length", None)
    return architecture.text_tokens if length is None else int(length) + architecture.further_text


def image_tokens(config: RunConfig, architecture: Architecture) -> int:
    """Return the most tokens of a row, text aside: of what is generated, and of the images it starts from."""
    model, references = config.model, 0
    if model.policy in REFERENCES:
        family = resolve(POLICIES, model.policy, label="model.policy")
        options = make_options(family.options_type, model.policy, model.options, label="model.options of")
        references = options.references * options.reference_area
    return architecture.tokens(height=model.height, width=model.width, frames=model.frames, references=references)
