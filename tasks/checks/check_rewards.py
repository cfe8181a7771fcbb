"""Refuses rewards that do not exist, need inputs that a run lacks, or have unsupported settings."""

from __future__ import annotations

from collections.abc import Sequence

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import resolve
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.base import Needs
from flowmill.models.rewards.differentiable import is_differentiable
from flowmill.models.rewards.factory import RewardCache, check_section, needs_of
from flowmill.tasks.inputs.fits import Fits
from flowmill.tasks.inputs.option_paths import reward_places
from flowmill.tasks.inputs.prompts import SOURCE, Prompt, image_column
from flowmill.tasks.inputs.renderer import reads_images
from flowmill.tasks.specs.plan import RunPlan

#: Characters that file systems and MLflow accept in names, in addition to letters and digits.
_IN_LABELS = "_-.: "
_LONGEST_LABEL = 100
#: Settings that only affect optimized rewards, with their neutral values.
_OPTIMIZED = {"weight": 1.0, "threshold": None, "standardize": False}


def check_rewards(plan: RunPlan, *, build: bool) -> None:
    """Check rewards, monitors and judges.

    Args:
        plan: of the config.
        build: also build them, which finds missing packages and wrong values.
    """
    config, sections = plan.config, reward_sections(plan.config)
    _check_labels(sections)
    _check_watched(config)
    _check_every_source(config)
    for section in sections:
        check_section(section)
        _check_sources(section, config)
        if section.server is not None:
            _check_served(section)
            continue
        check_needs(section, needs_of(section.name, section.options), plan)
        if build:
            RewardCache(Fits(config.store).located).of(section)


def check_followed(plan: RunPlan) -> None:
    """Check that rewards are differentiable, if the algorithm trains on their gradients."""
    config, requires = plan.config, plan.requires
    if not (requires.gradients or requires.rewards):
        return
    algorithm = f"optimize.algorithm '{config.optimize.algorithm.name}'"
    if not plan.family_spec.decodes_latents:
        raise ConfigError(
            f"{algorithm} trains on gradients of rewards, but clips of model.policy '{config.model.policy}' are "
            "decoded with the image they start from, which these are not given. Choose an algorithm that needs no "
            "gradients, such as grpo."
        )
    for section in config.rewards:
        label = resolve(REWARDS, section.name, label="reward")
        if is_differentiable(label) and not is_differentiable(label, section.options):
            raise ConfigError(
                f"rewards: '{section.slot}' has no gradient with options {dict(section.options)}, which {algorithm} "
                "trains on. Remove those that choose another form of it, or move it to monitors."
            )
        if not is_differentiable(label):
            differentiable = [name for name in REWARDS if is_differentiable(resolve(REWARDS, name, label="reward"))]
            raise ConfigError(
                f"rewards: '{section.slot}' has no gradient, which {algorithm} trains on. Take one of "
                f"{', '.join(differentiable)}, give your own a method 'differentiable', or move it to monitors."
            )
        if needs_of(section.name, section.options).groupwise:
            raise ConfigError(
                f"rewards: '{section.slot}' compares samples, but {algorithm} follows the score of each back to itself "
                "alone. Choose a reward that looks at one sample at a time."
            )
        settings = {
            "server": section.server,
            "threshold": section.threshold,
            "standardize": section.standardize or None,
        }
        for name, value in settings.items():
            if value is not None:
                why = "a server gives scores alone" if name == "server" else "it acts on scores, not on their gradients"
                raise ConfigError(
                    f"rewards: '{section.slot}' has {name} set, but {algorithm} trains on gradients, and {why}. Remove "
                    "it."
                )
        if section.frames == "clip":
            raise ConfigError(
                f"rewards: '{section.slot}' is given whole clips, but {algorithm} follows the scores of frames back. "
                "Set its 'frames' to a number or 'first'."
            )


def asked_of(section: RewardSection, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts whose samples a reward scores."""
    return [prompt for prompt in prompts if not section.sources or prompt.metadata.get(SOURCE) in section.sources]


def check_needs(section: RewardSection, needs: Needs, plan: RunPlan) -> None:
    """Check that a run has the media, source images and prompt columns that a reward needs."""
    config = plan.config
    if not reads_images(config, section):
        plan.modality.check_scored(section, needs, config)
    elif needs.media not in ("samples", "images"):
        remedy = "Set its 'reads' to 'texts'" if needs.media == "texts" else "Choose a reward that looks at images"
        raise ConfigError(
            f"rewards: '{section.slot}' scores {needs.media}, but with a section 'render' rewards get the images that "
            f"it draws. {remedy}."
        )
    if needs.references and image_column(config) is None:
        raise ConfigError(
            f"rewards: '{section.slot}' compares with the images that prompts start from, but prompts.image is not "
            "set. Name the column with their paths, with a model.policy that takes images, or choose another reward."
        )
    for split in ("train", "heldout"):
        source = "data.train" if config.data is not None and split == "train" else f"prompts.{split}"
        for prompt in asked_of(section, plan.prompts[split]):
            for column in needs.columns:
                if column not in prompt.metadata:
                    raise ConfigError(
                        f"rewards: '{section.slot}' needs the column '{column}' of the prompt source, which prompt "
                        f"{prompt.text!r} of {source} does not have. Add it, or choose another reward."
                    )


def _check_sources(section: RewardSection, config: RunConfig) -> None:
    sources = [source.name for source in config.prompts.sources]
    for name in section.sources:
        if name not in sources:
            raise ConfigError(
                f"rewards: '{section.slot}' scores the source '{name}', which prompts.sources does not have. "
                f"{did_you_mean(name, sources)}"
            )


def _check_every_source(config: RunConfig) -> None:
    for source in config.prompts.sources:
        if not any(not section.sources or source.name in section.sources for section in config.rewards):
            raise ConfigError(
                f"prompts.sources: no reward scores the prompts of '{source.name}', so nothing can be learned from "
                "them. Add it to the 'sources' of a reward, or remove it."
            )


def _check_labels(sections: Sequence[RewardSection]) -> None:
    slots = [section.slot for section in sections]
    for slot in slots:
        if slots.count(slot) > 1:
            raise ConfigError(f"rewards: '{slot}' appears {slots.count(slot)} times. Give each its own 'label'.")
        odd = "".join(dict.fromkeys(each for each in slot if not (each.isalnum() or each in _IN_LABELS)))
        if odd or len(slot.encode()) > _LONGEST_LABEL:
            fault = f"holds {odd!r}" if odd else f"has {len(slot.encode())} bytes"
            raise ConfigError(
                f"rewards: label '{slot[:_LONGEST_LABEL]}' {fault}. Labels become names of files and curves: "
                f"give one of letters, digits, '_', '-', '.', ':' and spaces, of {_LONGEST_LABEL} bytes at most."
            )


def _check_watched(config: RunConfig) -> None:
    watched = [("monitors", section) for section in config.monitors]
    for place, section in [*watched, *(("evaluate.judges", section) for section in config.evaluate.judges)]:
        for name, nothing in _OPTIMIZED.items():
            value = getattr(section, name)
            if value != nothing:
                raise ConfigError(
                    f"{place}: '{section.slot}' has {name} {value!r}, but rewards listed there are not optimized. "
                    "Remove it, or move the reward to 'rewards'."
                )


def _check_served(section: RewardSection) -> None:
    if section.device is not None:
        raise ConfigError(
            f"rewards: '{section.slot}' has the device '{section.device}' and a server, which does the work where it "
            "is. Remove one of the two; 'flowmill serve-reward --device' says where a server works."
        )
    if any(place.is_fit for place in reward_places(section)):
        raise ConfigError(
            f"rewards: '{section.slot}' names a fit of the store, which its server does not read. Copy it there with "
            "'flowmill reward fit CONFIG --to FOLDER', and set the option 'path' instead of 'run'."
        )
