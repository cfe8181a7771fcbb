"""The image model that draws texts, as a config of its own: whoever knows images works with that."""

from __future__ import annotations

from configs.render import RenderSection
from configs.rewards import RewardSection
from configs.schema import EvaluateSection, MediaSection, RolloutSection, RunConfig


def render_of(config: RunConfig) -> RenderSection:
    """Return the section of a run that draws texts; asked only of such."""
    assert config.render is not None
    return config.render


def renderer_config(config: RunConfig) -> RunConfig:
    """Return a config whose model is the one that draws, which samples as evaluations do, alone in each process."""
    section, execution = render_of(config), config.execution
    media = MediaSection(format=section.format, lossless=section.format == "png")
    alone = {
        "device": execution.render_device or execution.device,
        "rollout_batch_size": execution.render_rows,
        "strategy": "ddp",
        "fsdp_size": None,
        "offload": False,
        "sampling": "whole",
        "context_parallel": 1,
    }
    changes = {
        "model": section.model,
        "rollout": RolloutSection(steps=section.steps, solver=section.solver, store=config.rollout.store, media=media),
        "evaluate": EvaluateSection(solver=section.solver),
        "execution": execution.model_copy(update=alone),
        "render": None,
    }
    return config.model_copy(update=changes)


def reads_images(config: RunConfig, section: RewardSection) -> bool:
    """Return whether a reward scores what was drawn of texts."""
    return config.render is not None and section.reads != "texts"


def image_name(sample: str, image: int, *, of: int) -> str:
    """Return the id of an image of a text: that of the text where it has one alone."""
    return sample if of == 1 else f"{sample}-i{image:02d}"


def sample_name(image: str) -> str:
    """Return the id of the text of one of several images of it."""
    return image.rpartition("-i")[0]
