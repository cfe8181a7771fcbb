"""The settings of a run that MLflow shows: few parameters, and further tags."""

from __future__ import annotations

from typing import Any

from flowmill.configs.load import flatten
from flowmill.configs.schema import RunConfig

#: Settings logged as parameters, the others are tags: MLflow shows all parameters above each image grid.
_PARAMETERS = (
    *("algorithm", "base", "trained", "rewards", "rollout.prompts_per_epoch", "rollout.group_size"),
    *("optimize.learning_rate", "run.seed"),
)
#: Maximum number of logged settings.
_MOST = 20
_MAX_LENGTH = 500


def parameters(config: RunConfig) -> dict[str, str]:
    """Return the few settings that are logged as parameters."""
    return {key: value for key, value in _settings(config).items() if key in _PARAMETERS}


def further_settings(config: RunConfig) -> dict[str, str]:
    """Return the other settings for comparing runs: the main ones, then those that differ from the defaults.

    Settings that may change between invocations of a run are excluded.
    """
    return {key: value for key, value in _settings(config).items() if key not in _PARAMETERS}


def _settings(config: RunConfig) -> dict[str, str]:
    flat = flatten(config.model_dump(mode="json"))
    chosen = {name: value for name, value in _main_settings(config).items() if value is not None}
    plain = flatten(
        RunConfig(model=config.model, prompts=config.prompts, data=config.data, rewards=config.rewards).model_dump(
            mode="json"
        )
    )
    for key, value in flat.items():
        section = key.split(".")[0]
        named = key in chosen or section in ("model", "prompts", "data", "rewards", "store", "run", *_FREE)
        if (
            len(chosen) < _MOST
            and not named
            and plain.get(key) != value
            and key not in _RENAMED
            and not key.startswith(_KEPT)
        ):
            chosen[key] = value
    return {key: str(value)[:_MAX_LENGTH] for key, value in list(chosen.items())[:_MOST]}


_FREE = ("evaluate", "export", "execution", "tracking")
#: Settings logged under another name.
_RENAMED = ("optimize.algorithm.name", "rollout.sampler.name", "rollout.plan.name")
#: Settings of storage, which are not logged.
_KEPT = ("rollout.groups_per_shard", "rollout.store", "rollout.media.", "rollout.latents_dtype")


def _main_settings(config: RunConfig) -> dict[str, Any]:
    model, rollout, optimize = config.model, config.rollout, config.optimize
    lora = model.lora
    return {
        "algorithm": optimize.algorithm.name,
        "base": model.base_name,
        "family": model.policy,
        "model.quantize.name": model.quantizer,
        "trained": "all weights" if lora is None else f"LoRA {lora.brief()}",
        "rewards": ", ".join(reward.weighted for reward in config.rewards),
        "sampler": rollout.sampler.name,
        "plan": rollout.plan.name,
        "rollout.steps": rollout.steps,
        "rollout.prompts_per_epoch": rollout.prompts_per_epoch,
        "rollout.group_size": rollout.group_size,
        "model.guidance_scale": model.guidance_scale,
        "optimize.learning_rate": optimize.learning_rate,
        "optimize.updates_per_epoch": optimize.updates_per_epoch,
        "run.seed": config.run.seed,
    }
