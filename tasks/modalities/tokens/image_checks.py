"""Checks the configs of models that draw images token by token."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from configs.errors import ConfigError
from configs.schema import RunConfig
from models.memory.language_architectures import language_config
from tasks.algorithms.base import Requirements
from tasks.inputs.components import tokens_of
from tasks.modalities.forward_cost import Cost
from tasks.modalities.tokens.checks import FOREIGN, check_tokens

#: Settings of other kinds that these models have.
_OWN = {"model": {"height", "width", "guidance_scale"}, "rollout": {"media"}}


def check_image_tokens(config: RunConfig, requires: Requirements) -> None:
    """Check the settings of images from tokens, and that settings of other kinds are not used.

    Raises:
        ConfigError: a setting or combination is invalid.
    """
    algorithm, tokens, media = config.optimize.algorithm.name, tokens_of(config), config.rollout.media
    refused = {
        f"optimize.algorithm is '{algorithm}', which trains a critic": requires.critic,
        "rollout.tokens.stop is set: texts that end a sample": bool(tokens.stop),
        "rollout.media.latents is true: latents": media.latents,
        "rollout.media.format is 'none': samples without images": not media.decodes,
    }
    for found, present in refused.items():
        if present:
            raise ConfigError(
                f"{found}, which model.policy '{config.model.policy}', a model that draws images token by token, does "
                "not have. Remove it, or choose another."
            )
    foreign = {
        name: (section, tuple(field for field in fields if field not in _OWN.get(name, ())))
        for name, (section, fields) in FOREIGN.items()
    }
    check_tokens(config, requires, foreign=foreign, makes="images of tokens")
    about = None if config.model.path is None else language_config(config.model.path)
    if about is not None:
        check_image(config, about)


def check_image(config: RunConfig, about: Any) -> None:
    """Check that a run asks for images of the size that its model draws; ``about``: the model's config.

    Raises:
        ConfigError: it does not.
    """
    count, side = int(about.vision_config.num_image_tokens), int(about.vision_config.image_size)
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
    given images has none."""
    names = [name for name in asdict(cost) if name.endswith("_forwards")]
    names = names if config.data is None else ["evaluate_forwards"]
    copies = 2 if config.model.guidance_scale > 1 else 1
    return replace(cost, **{name: copies * getattr(cost, name) for name in names})
