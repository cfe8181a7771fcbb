"""The image model that draws texts, as a separate config, so that code for image models works with it unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.model_families import most_images, spec_of
from flowmill.configs.render import RenderSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import EvaluateSection, MediaSection, RolloutSection, RunConfig

#: Metadata key of the turn that a text was written in, or an image drawn in, after the first.
TURN_KEY = "render_turn"
#: Metadata key of the artifacts with the images that the texts of a sample saw, one for each turn before its last.
SEEN_KEY = "render_seen"


def render_of(config: RunConfig) -> RenderSection:
    """Return the ``render`` section of a run that has one."""
    assert config.render is not None
    return config.render


def renderer_config(config: RunConfig) -> RunConfig:
    """Return a config whose model is the image model; it samples as evaluations do, on its own in each process.

    Its prompts have images only if the image model reads them.
    """
    section, execution = render_of(config), config.execution
    alone = {
        "rollout_batch_size": execution.render_rows,
        "strategy": "ddp",
        "fsdp_size": None,
        "offload": False,
        "sampling": "whole",
        "context_parallel": 1,
    }
    # A family that can read images keeps them, so that reading none is noticed.
    unread = spec_of(section.model.policy).references is None and not most_images(
        section.model.policy, section.model.options
    )
    changes = {
        "model": section.model,
        **({"prompts": config.prompts.model_copy(update={"image": None})} if unread else {}),
        "rollout": RolloutSection(steps=section.steps, store=config.rollout.store, media=MediaSection(format="png")),
        "evaluate": EvaluateSection(),
        "execution": execution.model_copy(update=alone),
        "render": None,
    }
    return config.model_copy(update=changes)


def reads_images(config: RunConfig, section: RewardSection) -> bool:
    """Return whether a reward scores images drawn of texts."""
    return config.render is not None and section.reads != "texts"


def sees_images(config: RunConfig) -> bool:
    """Return whether the model sees the images of earlier turns."""
    return config.render is not None and config.render.turns is not None and config.render.turns.sees == "images"


def turn_in(metadata: Mapping[str, Any]) -> int:
    """Return the turn of a text or image from its metadata."""
    return int(metadata.get(TURN_KEY, 1))


def image_name(sample: str, image: int, *, of: int) -> str:
    """Return the id of an image of a text; with one image per text, the id of the text."""
    return sample if of == 1 else f"{sample}-i{image:02d}"


def sample_name(image: str) -> str:
    """Return the id of the text of an image, where a text has several."""
    return image.rpartition("-i")[0]
