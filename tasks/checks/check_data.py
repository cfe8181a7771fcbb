"""Checks the settings of runs that train on given samples."""

from __future__ import annotations

from configs.advantages import AdvantageSection
from configs.errors import ConfigError
from configs.schema import RunConfig
from models.policies import ANY_SIZE, CLIP_CONDITIONED, most_images
from tasks.algorithms.base import Requirements
from tasks.inputs.model_settings import check_model


def check_data(config: RunConfig, requires: Requirements) -> None:
    """Check that the algorithm can train on given samples, and that no setting of rollouts and rewards is without use.

    Raises:
        ConfigError: a setting cannot work.
    """
    if config.data is None:
        return
    algorithm = f"optimize.algorithm '{config.optimize.algorithm.name}'"
    needs = {
        "log-probs of stochastic steps": requires.data == "transitions",
        "stored states of a rollout": requires.data == "states",
        "the policy that made the samples": requires.behavior,
        "gradients of rewards": requires.gradients or requires.rewards > 0,
        "advantages of tokens": requires.per_token,
        "samples from the same noise": requires.same_noise,
    }
    for need, missing in needs.items():
        if missing:
            raise ConfigError(
                f"data: {algorithm} needs {need}, which given samples do not have. Use 'sft', 'dpo' or 'kto', or "
                "remove the section data."
            )
    rated = config.data.paired or config.data.rating is not None
    if requires.advantages and not rated:
        raise ConfigError(
            f"data: {algorithm} compares samples, but the rows have neither pairs nor ratings. Set data.chosen and "
            "data.rejected, or data.rating, or use the algorithm 'sft'."
        )
    without_use = {
        "monitors": bool(config.monitors),
        "render": config.render is not None,
        "optimize.replay": config.optimize.replay is not None,
        "prompts.sampler": config.prompts.chooses,
        "execution.ahead": config.execution.ahead > 0,
        "advantage": config.advantage.model_dump(exclude={"estimator"})
        != AdvantageSection().model_dump(exclude={"estimator"}),
    }
    for setting, is_set in without_use.items():
        if is_set:
            raise ConfigError(f"{setting} acts on rollouts, and a run with the section data has none. Remove it.")
    _check_buckets(config, requires)
    if config.model.policy in CLIP_CONDITIONED:
        raise ConfigError(
            f"data: model.policy '{config.model.policy}' starts chains from a clip, which its model does not see, so "
            "given samples train a model of text to video. Choose the family of that."
        )
    takes = most_images(config.model.policy, config.model.options)
    if bool(takes) != (config.data.prompt_image is not None) and takes is not None:
        raise ConfigError(
            f"data.prompt_image is not set, but the prompts of model.policy '{config.model.policy}' come with images. "
            "Name their column."
            if takes
            else f"data.prompt_image is '{config.data.prompt_image}', but model.policy '{config.model.policy}' takes "
            "no image. Remove it."
        )


def _check_buckets(config: RunConfig, requires: Requirements) -> None:
    """Check that the model takes images of several sizes, and that no samples of different sizes are compared."""
    assert config.data is not None
    if not config.data.buckets:
        return
    if config.model.policy not in ANY_SIZE or config.model.frames > 1:
        raise ConfigError(
            f"data.buckets has several sizes, but model.policy '{config.model.policy}' is trained on samples of one. "
            f"Remove it, or choose a family of {', '.join(sorted(ANY_SIZE))}."
        )
    if requires.unit != "row" and config.data.rating is not None:
        raise ConfigError(
            f"data.buckets gives rated images of one prompt several sizes, but optimize.algorithm "
            f"'{config.optimize.algorithm.name}' compares them at equal noise. Remove it, or give pairs."
        )
    for height, width in config.data.buckets:
        sized = config.model.model_copy(update={"height": height, "width": width})
        try:
            check_model(config.model_copy(update={"model": sized}))
        except ConfigError as error:
            raise ConfigError(f"data.buckets [{height}, {width}]: {error}") from None
