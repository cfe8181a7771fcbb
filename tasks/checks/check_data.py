"""Checks the settings of runs that train on samples of ``data``."""

from __future__ import annotations

from flowmill.configs.advantages import AdvantageSection
from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Rule, refuse
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import ANY_SIZE, CLIP_CONDITIONED, most_images
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.algorithms.checks import Trained
from flowmill.tasks.inputs.model_settings import check_model
from flowmill.tasks.modalities.modality import make_kind

#: Texts of several rules.
_NEEDS, _NOT_GIVEN = "data: {facts.algorithm} needs", "which given samples do not have"
_GIVEN = "Use 'sft', 'dpo' or 'kto', or remove the section data"
#: Values of settings of ``data`` that are not used.
_OFF = (False, "center", "one", 0.0)
_ACTS = "acts on rollouts, and a run with the section data has none"

DATA: tuple[Rule[Trained], ...] = (
    Rule("data", lambda f, _: f.requires.data == "transitions",
         f"log-probs of stochastic steps, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, _: f.requires.data == "states",
         f"stored states of a rollout, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, _: f.requires.behavior,
         f"the policy that made the samples, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, _: f.requires.gradients or f.requires.rewards > 0,
         f"gradients of rewards, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, _: f.requires.per_token,
         f"advantages of tokens, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, _: f.requires.same_noise,
         f"samples from the same noise, {_NOT_GIVEN}", _GIVEN, where=_NEEDS),
    Rule("data", lambda f, data: f.requires.advantages and not (data.paired or data.rating is not None),
         "the rows have neither pairs nor ratings",
         "Set data.chosen and data.rejected, or data.rating, or use the algorithm 'sft'",
         where="data: {facts.algorithm} compares samples, but"),
    Rule("monitors render optimize.replay execution.ahead", lambda f, value: value,
         _ACTS, "Remove it", where="{setting}"),
    Rule("prompts.sampler", lambda f, _: f.config.prompts.chooses, _ACTS, "Remove it", where="{setting}"),
    Rule("advantage", lambda f, section: section != AdvantageSection(),
         _ACTS, "Remove it", where="{setting}"),
    Rule("data.buckets",
         lambda f, value: value and (f.config.model.policy not in ANY_SIZE or f.config.model.frames > 1),
         "model.policy '{model.policy}' is trained on samples of one",
         f"Remove it, or choose a family of {', '.join(sorted(ANY_SIZE))}", where="{setting} has several sizes, but"),
    Rule("data.rating", lambda f, _: f.config.data and f.config.data.buckets and f.requires.unit != "row",
         "{facts.algorithm} compares them at equal noise",
         "Remove it, or give pairs", where="data.buckets gives rated images of one prompt several sizes, but"),
    Rule("data.flip data.crop data.captions data.empty_captions data.prior",
         lambda f, value: value not in _OFF and not make_kind(f.config).encodes,
         "model.policy '{model.policy}' is none",
         "Remove it", where="{setting} is for denoisers of images and films, but"),
    Rule("data.flip data.crop",
         lambda f, value: value not in _OFF and f.config.data and f.config.data.prompt_image is not None,
         "the images of data.prompt_image would stay as they are",
         "Remove it", where="{setting} changes samples, but"),
    Rule("data.prior", lambda f, _: f.requires.advantages or (f.config.data and f.config.data.rating is not None),
         "its rows have neither pairs nor ratings",
         "Remove it, or use the algorithm 'sft' without data.rating", where="{setting} goes with samples of one kind:"),
    Rule("model.policy", lambda f, family: family in CLIP_CONDITIONED,
         "its model does not see, so given samples train a model of text to video",
         "Choose the family of that", where="data: {setting} {value!r} starts chains from a clip, which"),
    Rule("model.policy",
         lambda f, family: f.config.data and f.config.data.prompt_image is None and _images(f.config),
         "the prompts of model.policy {value!r} come with images",
         "Name their column", where="data.prompt_image is not set, but"),
    Rule("data.prompt_image", lambda f, _: _images(f.config) == 0,
         "model.policy '{model.policy}' takes no image",
         "Remove it"),
)  # fmt: skip


def check_data(config: RunConfig, requires: Requirements) -> None:
    """Check that the algorithm can train on samples of ``data``, and that settings of rollouts have a use."""
    if config.data is None:
        return
    refuse(DATA, Trained(config=config, requires=requires))
    # The model takes images of each size.
    for height, width in config.data.buckets:
        sized = config.model.model_copy(update={"height": height, "width": width})
        try:
            check_model(config.model_copy(update={"model": sized}))
        except ConfigError as error:
            raise ConfigError(f"data.buckets [{height}, {width}]: {error}") from None


def _images(config: RunConfig) -> int | None:
    return most_images(config.model.policy, config.model.options)
