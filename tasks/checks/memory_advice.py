"""Changes with which a run fits a GPU: smaller batches, then switches, each tried by estimating the changed config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from configs.components import reward_sections
from configs.model import LoraSection, QuantizeSection
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.rewards.factory import why_not_spread, works_on_accelerator
from tasks.modalities.memory import SCORE

#: Returns the memory of each phase under a config.
Phases = Callable[[RunConfig], Mapping[str, int]]
#: Batch sizes by phase.
_BATCHES: Mapping[str, tuple[str, ...]] = {
    "encode": ("encode_batch_size",),
    "rollout": ("rollout_batch_size",),
    "decode": ("decode_batch_size",),
    "gradient": ("decode_batch_size",),
    "re-score": ("micro_batch_size",),
    "render": ("render_rows",),
    "value": ("micro_batch_size",),
    # The first is that of rewards which are called in training.
    "optimize": ("decode_batch_size", "micro_batch_size"),
}
_TRAINING = ("gradient", "optimize")
#: All but scoring, during which the policy rests.
_OF_POLICY = ("encode", "rollout", "decode", "re-score", "render", "value", *_TRAINING)
#: Switches in the order of their cost to the user: settings, and phases, if not all.
_SWITCHES: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...] = (
    ({"model.gradient_checkpointing": True}, _TRAINING),
    ({"model.vae_tiling": True}, ("decode",)),
    ({"execution.keep_renderer": False}, ()),
    ({"execution.strategy": "fsdp"}, ()),
    ({"execution.strategy": "fsdp", "execution.sampling": "spread"}, ()),
    ({"critic.backbone": "policy"}, ("value", *_TRAINING)),
    ({"model.lora": LoraSection(rank=32, alpha=64)}, ()),
    ({"model.dtype": "bfloat16"}, ()),
    ({"execution.offload": True}, _TRAINING),
    ({"model.quantize": QuantizeSection(name="int8")}, _OF_POLICY),
    ({"model.quantize": QuantizeSection(name="nf4")}, _OF_POLICY),
    ({"model.quantize": QuantizeSection(text_encoders="int8")}, ("encode",)),
)
_SERVER = (
    "let a server on another GPU score ('flowmill serve-reward', rewards[].server), or give the models of rewards a "
    "device of their own (rewards[].device)"
)


def advice(config: RunConfig, limit: int, phases: Phases, last: Mapping[str, str]) -> list[str]:
    """Return changes with which a run fits into ``limit`` bytes per GPU; empty when it already fits.

    Args:
        config: the config.
        limit: bytes.
        phases: estimates a changed config.
        last: remedies by phase if no change is enough; '' for all others.
    """
    over = (name for name, size in phases(config).items() if size > limit)
    found = ((name, changes_for(config, name, limit, phases)) for name in over)
    return [
        f"{name}: {', '.join([*changes, *([] if fits else [last.get(name, _SERVER if name == SCORE else last[''])])])}"
        for name, (changes, fits) in found
    ]


def changes_for(config: RunConfig, phase: str, limit: int, phases: Phases) -> tuple[list[str], bool]:
    """Return changes that reduce the memory of a phase, as few as make it fit, and whether they do."""
    changes = list[str]()
    batch = _batch(config, phase, limit, phases)
    if batch is not None:
        return batch, True
    for text, changed in _switched(config, phase, phases):
        changes.append(text)
        batch = _batch(changed, phase, limit, phases)
        if batch is not None:
            return [*changes, *batch], True
    return changes, False


def _batch(config: RunConfig, phase: str, limit: int, phases: Phases) -> list[str] | None:
    """Return the change to the largest batch that fits, nothing if the configured one does; None if no batch fits."""
    if phases(config)[phase] <= limit:
        return []
    if phase == SCORE:
        one = [section.model_copy(update={"batch_size": 1}) for section in config.rewards]
        smaller = config.model_copy(update={"rewards": tuple(one)})
        return ["lower rewards[].batch_size"] if phases(smaller)[SCORE] <= limit else None
    for name in _BATCHES[phase]:
        # Decoding has the batches of rollouts by default.
        rows, fits, most = 1, 0, _read(config, f"execution.{name}") or config.execution.rollout_batch_size
        while most - fits > 1 and (fits or rows == 1):
            enough = phases(_with(config, {f"execution.{name}": rows}))[phase] <= limit
            fits, most = (rows, most) if enough else (fits, rows)
            rows = (fits + most) // 2
        if fits:
            return [f"set execution.{name}={fits}"]
    return None


def _switched(config: RunConfig, phase: str, phases: Phases) -> Iterator[tuple[str, RunConfig]]:
    """Yield the switches that reduce the memory of a phase, each with the config after it and all before it."""
    for settings, of in _SWITCHES:
        new = {setting: value for setting, value in settings.items() if _read(config, setting) != value}
        if (of and phase not in of) or not all(_possible(config, setting) for setting in new):
            continue
        changed = _with(config, new)
        if phases(changed)[phase] < phases(config)[phase]:
            config = changed
            yield "set " + ", ".join(f"{setting}={_text(value)}" for setting, value in new.items()), config
    able = [section.slot for section in reward_sections(config) if _could_be_spread(section)]
    if phase == SCORE and able and config.execution.ranks > 1:
        rewards = (
            section.model_copy(update={"spread": True}) if _could_be_spread(section) else section
            for section in config.rewards
        )
        yield f"set 'spread: true' of {', '.join(able)}", config.model_copy(update={"rewards": tuple(rewards)})


def _possible(config: RunConfig, setting: str) -> bool:
    """Return whether a switch fits the other settings."""
    model, execution, critic = config.model, config.execution, config.critic
    return {
        "model.lora": model.lora is None,
        "model.dtype": model.dtype == "float32",
        "model.quantize": model.lora is not None and execution.strategy != "fsdp" and not model.compile,
        "execution.strategy": execution.ranks > 1,
        "execution.sampling": execution.ranks > 1,
        "execution.offload": execution.ranks > 1 and execution.strategy == "fsdp" and not execution.offload,
        "critic.backbone": critic.path is None and critic.device is None and critic.dtype is None,
    }.get(setting, True)


def _could_be_spread(section: RewardSection) -> bool:
    """Return whether the ranks could shard the model of a reward that each holds whole now."""
    return not section.spread and works_on_accelerator(section) and why_not_spread(section) is None


def _read(config: RunConfig, setting: str) -> Any:
    section, name = setting.split(".")
    return getattr(getattr(config, section), name)


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    for setting, value in settings.items():
        section, name = setting.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def _text(value: Any) -> str:
    if isinstance(value, LoraSection):
        return f"{{rank: {value.rank}, alpha: {value.alpha}}}"
    if isinstance(value, QuantizeSection):
        return "{" + ", ".join(f"{name}: {given}" for name, given in value.model_dump(exclude_none=True).items()) + "}"
    return str(value).lower()
