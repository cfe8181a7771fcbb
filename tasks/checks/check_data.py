"""Checks the settings of runs that train on samples of ``data``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from flowmill.configs.advantages import AdvantageSection
from flowmill.configs.data import DataSection
from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import families
from flowmill.configs.refusals import Refusal, refuse, set_settings
from flowmill.configs.schema import RunConfig
from flowmill.tasks.algorithms.checks import Trained
from flowmill.tasks.inputs.model_settings import check_model
from flowmill.tasks.specs.plan import RunPlan

_ACTS = "acts on rollouts, and a run with the section data has none"


def _missing(facts: Trained, data: DataSection) -> Iterator[Refusal]:
    """Yield what an algorithm needs and samples of ``data`` lack."""
    requires = facts.requires
    for missing, needed in (
        (requires.data == "transitions", "log-probs of stochastic steps"),
        (requires.data == "states", "stored states of a rollout"),
        (requires.behavior, "the policy that made the samples"),
        (requires.gradients or requires.rewards > 0, "gradients of rewards"),
        (requires.per_token, "advantages of tokens"),
        (requires.same_noise, "samples from the same noise"),
    ):
        if missing:
            yield Refusal(
                "data",
                f"{needed}, which given samples do not have",
                "Use 'sft', 'dpo' or 'kto', or remove the section data",
                f"data: {facts.algorithm} needs",
            )
    if requires.advantages and not (data.paired or data.rating is not None):
        yield Refusal(
            "data",
            "the rows have neither pairs nor ratings",
            "Set chosen and rejected of data.columns, or rating, or use the algorithm 'sft'",
            f"data: {facts.algorithm} compares samples, but",
        )


def _without_use(config: RunConfig) -> Iterator[Refusal]:
    for setting, value in set_settings(config, "monitors render optimize.replay execution.ahead"):
        if value:
            yield Refusal(setting, _ACTS, "Remove it", setting)
    if config.prompts.chooses:
        yield Refusal("prompts.sampler", _ACTS, "Remove it", "prompts.sampler")
    if config.advantage != AdvantageSection():
        yield Refusal("advantage", _ACTS, "Remove it", "advantage")


def _images(plan: RunPlan, facts: Trained, data: DataSection) -> Iterator[Refusal]:
    spec, policy = plan.family_spec, plan.config.model.policy
    if data.buckets and not spec.any_size:
        yield Refusal(
            "data.buckets",
            f"model.policy '{policy}' is trained on samples of one",
            f"Remove it, or choose a family of {', '.join(families(lambda spec: spec.any_size))}",
            "data.buckets has several sizes, but",
        )
    if data.rating is not None and data.buckets and facts.requires.unit != "row":
        yield Refusal(
            "data.columns.rating",
            f"{facts.algorithm} compares them at equal noise",
            "Remove it, or give pairs",
            "data.buckets gives rated images of one prompt several sizes, but",
        )
    if spec.starts_from == "clip":
        yield Refusal(
            "model.policy",
            "its model does not see, so given samples train a model of text to video",
            "Choose the family of that",
            f"data: model.policy '{policy}' starts chains from a clip, which",
        )
    if data.prompt_image is None and plan.most_images:
        yield Refusal(
            "data.columns.prompt_image",
            f"the prompts of model.policy '{policy}' come with images",
            "Name their column",
            "data.columns.prompt_image is not set, but",
        )
    if data.prompt_image is not None and plan.most_images == 0:
        yield Refusal("data.columns.prompt_image", f"model.policy '{policy}' takes no image", "Remove it")


def _variants(plan: RunPlan, facts: Trained, data: DataSection) -> Iterator[Refusal]:
    config, requires = plan.config, facts.requires
    names = "data.flip data.crop data.captions data.empty_captions data.prior"
    used = [name for name, value in set_settings(config, names) if value not in (False, "center", "one", 0.0)]
    for setting in used if not plan.modality.encodes else ():
        where = f"{setting} is for denoisers of images and films, but"
        yield Refusal(setting, f"model.policy '{config.model.policy}' is none", "Remove it", where)
    for setting in used if data.prompt_image is not None else ():
        if setting in ("data.flip", "data.crop"):
            why = "the images of data.columns.prompt_image would stay as they are"
            yield Refusal(setting, why, "Remove it", f"{setting} changes samples, but")
    if data.prior is not None and (requires.advantages or data.rating is not None):
        yield Refusal(
            "data.prior",
            "its rows have neither pairs nor ratings",
            "Remove it, or use the algorithm 'sft' without ratings",
            "data.prior goes with samples of one kind:",
        )


def check_data(plan: RunPlan) -> None:
    """Check that the algorithm can train on samples of ``data``, and that settings of rollouts have a use."""
    config, data, facts = plan.config, plan.config.data, Trained(config=plan.config, requires=plan.requires)
    if data is None:
        return
    refuse(config, chain(_missing(facts, data), _without_use(config)))
    refuse(config, chain(_variants(plan, facts, data), _images(plan, facts, data)))
    # The model takes images of each size.
    for height, width in data.buckets:
        try:
            check_model(plan.sized(height, width))
        except ConfigError as error:
            raise ConfigError(f"data.buckets [{height}, {width}]: {error}") from None
