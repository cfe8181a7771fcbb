"""Checks the configs of models that draw images token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Refusal, refuse
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.language_architectures import language_config
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.tokens.checks import check_tokens
from flowmill.tasks.specs.plan import RunPlan


def _refusals(config: RunConfig, requires: Requirements) -> Iterator[Refusal]:
    lacks = f"model.policy '{config.model.policy}', a model that draws images token by token, does not have"
    if requires.critic:
        yield Refusal(
            "optimize.algorithm",
            lacks,
            "Remove it, or choose another",
            f"optimize.algorithm is '{config.optimize.algorithm.name}', which trains a critic, which",
        )
    if not config.rollout.media.decodes:
        yield Refusal(
            "rollout.media.format",
            lacks,
            "Remove it, or choose another",
            "rollout.media.format is 'none': samples without images, which",
        )


def check_image_tokens(plan: RunPlan) -> None:
    """Check the settings of images from tokens, and that settings of other kinds are not used."""
    config = plan.config
    refuse(config, _refusals(config, plan.requires))
    check_tokens(plan)
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
