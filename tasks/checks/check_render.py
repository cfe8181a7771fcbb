"""Refuses an image model that cannot draw texts, or whose images no reward reads."""

from __future__ import annotations

from collections.abc import Iterator

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError, PromptError
from flowmill.configs.refusals import Refusal, refuse, set_settings
from flowmill.configs.render import TurnsSection
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.model_settings import check_model, check_reference_images
from flowmill.tasks.inputs.renderer import SEEN_KEY, TURN_KEY, reads_images, sees_images
from flowmill.tasks.specs.plan import RunPlan


def _image_model(plan: RunPlan) -> Iterator[Refusal]:
    config, drawer = plan.config, plan.drawer
    if not plan.modality.writes:
        yield Refusal(
            "render",
            f"model.policy '{config.model.policy}' writes none",
            "Remove it, or train a model that does, such as causal_lm",
            "render draws texts, but",
        )
    if not drawer.modality.draws:
        where, remedy = (
            f"render.model.policy '{drawer.config.model.policy}'",
            "Choose a family of image models, such as sd3",
        )
        yield Refusal("render.model.policy", "cannot draw texts", remedy, where)
    for setting, value in set_settings(
        config,
        "render.model.lora render.model.start render.model.start_config render.model.gradient_checkpointing "
        "render.model.frames",
    ):
        if value is True or value not in (0, 1):
            yield Refusal(
                setting,
                "that model is never trained and draws images",
                "Remove it; a model that was trained before is one by its exported folder, in render.model.path",
                f"{setting} is set, but",
            )


def _unread_images(config: RunConfig) -> Iterator[Refusal]:
    if not any(reads_images(config, section) for section in reward_sections(config)):
        yield Refusal(
            "render",
            "every reward, monitor and judge has reads 'texts', so nothing looks at them",
            "Remove render, or one reward's 'reads'",
            "render draws images, but",
        )


def _turns(plan: RunPlan, turns: TurnsSection) -> Iterator[Refusal]:
    config = plan.config
    labels = [section.slot for section in config.scored if reads_images(config, section)]
    if not labels or turns.by not in (None, *labels):
        yield Refusal(
            "render.turns.by",
            f"comments are on images, and the rewards and monitors of images are: {', '.join(labels) or 'none'}",
            "Name one of them, or add a reward",
        )
    if config.optimize.shared_prompts:
        yield Refusal(
            "optimize.shared_prompts",
            "with render.turns the texts of a group share only the beginning of their conversations",
            "Remove it",
            "optimize.shared_prompts is true, but",
        )
    if not sees_images(config) and not turns.comment:
        yield Refusal(
            "render.turns.comment",
            "a next text could not depend on the image",
            "Write a comment, or set render.turns.sees to 'images'",
            "render.turns.comment is empty, so",
        )
    if sees_images(config) and plan.most_images == 0:
        yield Refusal(
            "render.turns.sees",
            f"model.policy '{config.model.policy}' reads texts alone",
            "Choose vision_lm, or set render.turns.sees to 'comments'",
        )


def check_render(plan: RunPlan) -> None:
    """Check the section ``render``; without one, check that no setting depends on it."""
    config = plan.config
    if config.render is None:
        _check_absent(config)
        return
    refuse(config, _image_model(plan))
    _check_drawer(plan)
    refuse(config, _unread_images(config))
    if config.render.turns is not None:
        refuse(config, _turns(plan, config.render.turns))
        _check_turns(plan, config.render.turns, config.render.images)


def _check_drawer(plan: RunPlan) -> None:
    drawer = plan.drawer
    try:
        check_model(drawer)
        if drawer.config.prompts.image is not None:
            check_reference_images(drawer, [*plan.prompts["train"], *plan.prompts["heldout"]])
    except (ConfigError, PromptError) as error:
        raise type(error)(f"render: {error}") from None


def _check_turns(plan: RunPlan, turns: TurnsSection, images: int) -> None:
    """Check that nothing else has the place of a turn, and that a conversation's images fit."""
    config = plan.config
    for split, prompts in plan.prompts.items():
        for key, use in ((TURN_KEY, "the turn of a sample"), (SEEN_KEY, "the images that a sample saw")):
            if any(key in prompt.metadata for prompt in prompts):
                raise ConfigError(f"prompts.{split} has a column '{key}', which the store uses for {use}. Rename it.")
    policy, most = config.model.policy, plan.most_images
    own = max(len(prompt.images) for split in plan.prompts.values() for prompt in split)
    drawn = (turns.count - 1) * images
    if sees_images(config) and most is not None and own + drawn > most:
        raise ConfigError(
            f"render.turns: a conversation may have {own + drawn} images, {own} of the prompt and {drawn} drawn, "
            f"but model.policy '{policy}' takes {most} as it is set. Raise model.options.images, or lower "
            "render.turns.count or render.images."
        )


def _check_absent(config: RunConfig) -> None:
    for section in reward_sections(config):
        if section.reads is not None:
            raise ConfigError(
                f"rewards: '{section.slot}' has reads '{section.reads}', which chooses between texts and images drawn "
                "of them, but the config has no section 'render'. Remove it."
            )
