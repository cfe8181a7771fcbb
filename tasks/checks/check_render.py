"""Refuses an image model that cannot draw texts, or whose images no reward reads."""

from __future__ import annotations

from configs.components import reward_sections
from configs.errors import ConfigError, PromptError
from configs.execution import ExecutionSection
from configs.model import ModelSection
from configs.render import TurnsSection
from configs.schema import RunConfig
from models.policies import most_images
from models.rewards.factory import needs_of
from tasks.inputs.components import make_solver
from tasks.inputs.model_settings import check_model, check_reference_images
from tasks.inputs.renderer import SEEN_KEY, TURN_KEY, reads_images, render_of, renderer_config, sees_images
from tasks.inputs.source_prompts import source_prompts
from tasks.modalities.modality import make_kind
from tasks.specs.turns import returns_best, turns_of

#: Execution settings of the image model, which have no effect without one.
_OF_EXECUTION = ("render_rows", "render_device", "keep_renderer")
#: Model settings that apply to training or clips only.
_FOREIGN = ("lora", "checkpoint", "start", "start_config", "gradient_checkpointing", "frames")


def check_render(config: RunConfig) -> None:
    """Check the section ``render``; without one, check that no setting depends on it.

    Raises:
        ConfigError: a setting cannot work, or has no effect.
    """
    if config.render is None:
        _check_absent(config)
        return
    policy = config.model.policy
    if not make_kind(config).writes:
        raise ConfigError(
            f"render draws texts, but model.policy '{policy}' writes none. Remove it, or train a model that does, such "
            "as causal_lm."
        )
    _check_drawer(config)
    if not any(reads_images(config, section) for section in reward_sections(config)):
        raise ConfigError(
            "render draws images, but every reward, monitor and judge has reads 'texts', so nothing looks at them. "
            "Remove render, or one reward's 'reads'."
        )
    turns = turns_of(config)
    if turns is not None:
        _check_turns(config, turns)
        _check_sight(config, turns)
    if returns_best(config):
        _check_best(config)


def _check_drawer(config: RunConfig) -> None:
    """Check the image model as the model of a run."""
    drawer, model = renderer_config(config), render_of(config).model
    if not make_kind(drawer).draws:
        raise ConfigError(
            f"render.model.policy '{model.policy}' cannot draw texts. Choose a family of image models, such as sd3."
        )
    for name in _FOREIGN:
        value = getattr(model, name)
        if value != ModelSection.model_fields[name].default:
            raise ConfigError(
                f"render.model.{name} is set, but that model is never trained and draws images. Remove it; a model "
                "that was trained before is one by its exported folder, in render.model.path."
            )
    make_solver(render_of(config).solver, "render.solver")
    try:
        check_model(drawer)
        if drawer.prompts.image is not None:
            sources = source_prompts(config)
            check_reference_images(drawer, [*sources["train"], *sources["heldout"]])
    except (ConfigError, PromptError) as error:
        raise type(error)(f"render: {error}") from None


def _check_turns(config: RunConfig, turns: TurnsSection) -> None:
    """Check that a reward of images comments on them, and that nothing else has the place of a turn."""
    labels = [section.slot for section in config.scored if reads_images(config, section)]
    if not labels or turns.by not in (None, *labels):
        named = ", ".join(labels) or "none"
        raise ConfigError(
            f"render.turns.by is {turns.by!r}, but comments are on images, and the rewards and monitors of images are: "
            f"{named}. Name one of them, or add a reward."
        )
    if config.optimize.shared_prompts:
        raise ConfigError(
            "optimize.shared_prompts is true, but with render.turns the texts of a group share only the beginning of "
            "their conversations. Remove it."
        )
    for split, prompts in source_prompts(config).items():
        for key, use in ((TURN_KEY, "the turn of a sample"), (SEEN_KEY, "the images that a sample saw")):
            if any(key in prompt.metadata for prompt in prompts):
                raise ConfigError(f"prompts.{split} has a column '{key}', which the store uses for {use}. Rename it.")


def _check_sight(config: RunConfig, turns: TurnsSection) -> None:
    """Check that a model that is asked to see images can, and that another one reads comments."""
    if not sees_images(config):
        if not turns.comment:
            raise ConfigError(
                "render.turns.comment is empty, so a next text could not depend on the image. Write a comment, or set "
                "render.turns.sees to 'images'."
            )
        return
    policy, most = config.model.policy, most_images(config.model.policy, config.model.options)
    if most == 0:
        raise ConfigError(
            f"render.turns.sees is 'images', but model.policy '{policy}' reads texts alone. Choose vision_lm, or set "
            "render.turns.sees to 'comments'."
        )
    prompts = [prompt for split in source_prompts(config).values() for prompt in split]
    given, drawn = max(len(prompt.images) for prompt in prompts), (turns.count - 1) * render_of(config).images
    if most is not None and given + drawn > most:
        raise ConfigError(
            f"render.turns: a conversation may have {given + drawn} images, {given} of the prompt and {drawn} drawn, "
            f"but model.policy '{policy}' takes {most} as it is set. Raise model.options.images, or lower "
            "render.turns.count or render.images."
        )


def _check_best(config: RunConfig) -> None:
    """Check that the turns of a sample can be compared."""
    if not any(reads_images(config, section) for section in config.rewards):
        raise ConfigError(
            "render.turns.returns is 'best', but no reward reads images, so scores do not depend on the turn's "
            "images. Add a reward of images, or set returns to 'last'."
        )
    for section in config.scored:
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
    for name in _OF_EXECUTION:
        if getattr(config.execution, name) != ExecutionSection.model_fields[name].default:
            raise ConfigError(
                f"execution.{name} is set, but the config has no section 'render', so it would do nothing. Remove it."
            )
