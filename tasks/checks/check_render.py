"""Refuses an image model that cannot draw texts, or whose images no reward reads."""

from __future__ import annotations

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError, PromptError
from flowmill.configs.refusals import Rule, refuse
from flowmill.configs.render import TurnsSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import most_images
from flowmill.models.rewards.factory import needs_of
from flowmill.tasks.inputs.components import make_solver
from flowmill.tasks.inputs.model_settings import check_model, check_reference_images
from flowmill.tasks.inputs.renderer import SEEN_KEY, TURN_KEY, reads_images, render_of, renderer_config, sees_images
from flowmill.tasks.inputs.source_prompts import source_prompts
from flowmill.tasks.modalities.modality import make_kind
from flowmill.tasks.specs.turns import returns_best


def _named_instead(config: RunConfig, turns: TurnsSection) -> str:
    """Return the rewards and monitors of images, or none, if the one that is to comment is not among them."""
    labels = [section.slot for section in config.scored if reads_images(config, section)]
    return "" if labels and turns.by in (None, *labels) else ", ".join(labels) or "none"


#: Of the image model.
RENDER: tuple[Rule[RunConfig], ...] = (
    Rule("render", lambda c, _: not make_kind(c).writes,
         "model.policy '{model.policy}' writes none",
         "Remove it, or train a model that does, such as causal_lm", where="{setting} draws texts, but"),
    Rule("render.model.policy", lambda c, _: not make_kind(renderer_config(c)).draws,
         "cannot draw texts",
         "Choose a family of image models, such as sd3", where="{setting} '{value}'"),
    Rule("render.model.lora render.model.start render.model.start_config "
         "render.model.gradient_checkpointing render.model.frames",
         lambda _, value: value is True or value not in (0, 1),
         "that model is never trained and draws images",
         "Remove it; a model that was trained before is one by its exported folder, in render.model.path",
         where="{setting} is set, but"),
)  # fmt: skip
#: Of the images, and of turns.
IMAGES: tuple[Rule[RunConfig], ...] = (
    Rule("render", lambda c, _: not any(reads_images(c, section) for section in reward_sections(c)),
         "every reward, monitor and judge has reads 'texts', so nothing looks at them",
         "Remove render, or one reward's 'reads'", where="{setting} draws images, but"),
    Rule("render.turns", _named_instead,
         "comments are on images, and the rewards and monitors of images are: {found}",
         "Name one of them, or add a reward", where="{setting}.by is {value.by!r}, but"),
    Rule("render.turns", lambda c, _: c.optimize.shared_prompts,
         "with {setting} the texts of a group share only the beginning of their conversations",
         "Remove it", where="optimize.shared_prompts is true, but"),
    Rule("render.turns", lambda c, turns: not sees_images(c) and not turns.comment,
         "a next text could not depend on the image",
         "Write a comment, or set render.turns.sees to 'images'", where="{setting}.comment is empty, so"),
    Rule("render.turns", lambda c, _: sees_images(c) and most_images(c.model.policy, c.model.options) == 0,
         "model.policy '{model.policy}' reads texts alone",
         "Choose vision_lm, or set render.turns.sees to 'comments'", where="{setting}.sees is 'images', but"),
    Rule("render.turns",
         lambda c, _: returns_best(c) and not any(reads_images(c, section) for section in c.rewards),
         "no reward reads images, so scores do not depend on the turn's images",
         "Add a reward of images, or set returns to 'last'", where="{setting}.returns is 'best', but"),
)  # fmt: skip


def check_render(config: RunConfig) -> None:
    """Check the section ``render``; without one, check that no setting depends on it."""
    refuse(RENDER, config)
    if config.render is None:
        _check_absent(config)
        return
    _check_drawer(config)
    refuse(IMAGES, config)
    if config.render.turns is not None:
        _check_turns(config, config.render.turns)


def _check_drawer(config: RunConfig) -> None:
    """Check the image model as the model of a run."""
    drawer = renderer_config(config)
    make_solver(render_of(config).solver, "render.solver")
    try:
        check_model(drawer)
        if drawer.prompts.image is not None:
            sources = source_prompts(config)
            check_reference_images(drawer, [*sources["train"], *sources["heldout"]])
    except (ConfigError, PromptError) as error:
        raise type(error)(f"render: {error}") from None


def _check_turns(config: RunConfig, turns: TurnsSection) -> None:
    """Check that nothing else has the place of a turn, that a conversation's images fit, and that turns compare."""
    sources = source_prompts(config)
    for split, prompts in sources.items():
        for key, use in ((TURN_KEY, "the turn of a sample"), (SEEN_KEY, "the images that a sample saw")):
            if any(key in prompt.metadata for prompt in prompts):
                raise ConfigError(f"prompts.{split} has a column '{key}', which the store uses for {use}. Rename it.")
    policy, most = config.model.policy, most_images(config.model.policy, config.model.options)
    own = max(len(prompt.images) for split in sources.values() for prompt in split)
    drawn = (turns.count - 1) * render_of(config).images
    if sees_images(config) and most is not None and own + drawn > most:
        raise ConfigError(
            f"render.turns: a conversation may have {own + drawn} images, {own} of the prompt and {drawn} drawn, "
            f"but model.policy '{policy}' takes {most} as it is set. Raise model.options.images, or lower "
            "render.turns.count or render.images."
        )
    for section in config.scored if returns_best(config) else ():
        if section.server is None and needs_of(section.name, section.options).groupwise:
            raise ConfigError(
                f"render.turns.returns is 'best', but '{section.slot}' compares the samples of a group, of which later "
                "turns have only some. Remove it, or set returns to 'last'."
            )


def _check_absent(config: RunConfig) -> None:
    for section in reward_sections(config):
        if section.reads is not None:
            raise ConfigError(
                f"rewards: '{section.slot}' has reads '{section.reads}', which chooses between texts and images drawn "
                "of them, but the config has no section 'render'. Remove it."
            )
