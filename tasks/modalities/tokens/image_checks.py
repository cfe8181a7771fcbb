"""Checks the configs of models that draw images token by token."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Rule, refuse
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.language_architectures import language_config
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.algorithms.checks import Trained
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.tokens.checks import check_tokens

_LACKS = "model.policy '{model.policy}', a model that draws images token by token, does not have"
_OTHER = "Remove it, or choose another"

IMAGE_TOKENS: tuple[Rule[Trained], ...] = (
    Rule("optimize.algorithm", lambda f, _: f.requires.critic,
         _LACKS, _OTHER, where="{setting} is '{value.name}', which trains a critic, which"),
    Rule("rollout.media.format", lambda f, _: not f.config.rollout.media.decodes,
         _LACKS, _OTHER, where="{setting} is 'none': samples without images, which"),
)  # fmt: skip


def check_image_tokens(config: RunConfig, requires: Requirements) -> None:
    """Check the settings of images from tokens, and that settings of other kinds are not used."""
    refuse(IMAGE_TOKENS, Trained(config=config, requires=requires))
    check_tokens(config, requires)
    architecture = None if config.model.path is None else language_config(config.model.path)
    if architecture is not None:
        check_image(config, architecture)


def check_image(config: RunConfig, architecture: Any) -> None:
    """Check that a run draws images of the size of its model; ``architecture``: the model's config."""
    count, side = int(architecture.vision_config.num_image_tokens), int(architecture.vision_config.image_size)
    for setting, value, own in (
        ("rollout.tokens.max_new", tokens_of(config).max_new, count),
        ("model.height", config.model.height, side),
        ("model.width", config.model.width, side),
    ):
        if value != own:
            raise ConfigError(
                f"{setting} is {value}, but an image of the model has {count} tokens, and {side} x {side} pixels. Set "
                f"{setting} to {own}."
            )


def with_guidance(cost: Cost, config: RunConfig) -> Cost:
    """Return the cost of a run with two rows of the model per row of a sample, where there is guidance; training on
    images of data has none."""
    names = [name for name in asdict(cost) if name.endswith("_forwards")]
    names = names if config.data is None else ["evaluate_forwards"]
    copies = 2 if config.model.guidance_scale > 1 else 1
    return replace(cost, **{name: copies * getattr(cost, name) for name in names})
