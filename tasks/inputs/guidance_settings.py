"""Checks of guidance: negative prompts, scales and options without effect. Stored runs may have such."""

from __future__ import annotations

from flowmill.configs.errors import ConfigError
from flowmill.models.memory.architectures import architecture_of
from flowmill.models.policies.pipeline_configs import settings_of
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.resolved import ResolvedConfig


def check_guidance(plan: ResolvedConfig) -> None:
    """Check that guidance and everything it needs act; raise ConfigError."""
    model, spec = plan.config.model, plan.family_spec
    # A blank one asks for nothing; presets of Qwen-Image have it, as its pipeline guides only with one.
    if model.negative_prompt.strip() and not uses_guidance(plan.config):
        reasons = {
            "input": f"guidance is an input of model.policy '{model.policy}', which takes no negative prompt",
            "blank": f"guidance of model.policy '{model.policy}' compares with a prompt without its tokens",
            "pair": f"model.guidance_scale {model.guidance_scale} switches guidance off",
        }
        raise ConfigError(
            f"model.negative_prompt is {model.negative_prompt!r}, but {reasons[spec.guidance]}. Remove it."
        )
    if spec.guidance == "input" and model.guidance_scale != 1 and not _takes_guidance(str(model.path)):
        raise ConfigError(
            f"model.guidance_scale is {model.guidance_scale}, but '{model.path}' has no input for it (guidance_embeds "
            "in transformer/config.json), as it is distilled for few steps. Set it to 1."
        )
    if spec.instructed and model.options.get("instruction", True) and model.negative_prompt:
        raise ConfigError(
            f"model.negative_prompt is {model.negative_prompt!r}, but model.policy '{model.policy}' writes an "
            "instruction before every text that is not empty, and its pipeline writes none before negative prompts. "
            "Remove it, or set model.options.instruction to false."
        )
    rescale = model.options.get("guidance_rescale", 0)
    if rescale and model.guidance_scale <= 1:
        raise ConfigError(
            f"model.options.guidance_rescale is {rescale}, but model.guidance_scale {model.guidance_scale} switches "
            "guidance off, so there is nothing to rescale. Set model.guidance_scale above 1, or remove it."
        )
    sound = model.options.get("audio_guidance_scale")
    if isinstance(sound, int | float) and sound > 1 and model.guidance_scale <= 1:
        raise ConfigError(
            f"model.options.audio_guidance_scale is {sound}, but model.guidance_scale {model.guidance_scale} switches "
            "guidance off, for sound too. Set model.guidance_scale above 1, or remove it."
        )
    second = model.options.get("guidance_scale_2")
    if second is None:
        return
    if model.policy not in ("wan22", "wan22_i2v"):
        raise ConfigError(
            f"model.options.guidance_scale_2 is {second}, but model.policy '{model.policy}' has no second transformer. "
            "Remove it."
        )
    if second > 1 and model.guidance_scale <= 1:
        raise ConfigError(
            f"model.options.guidance_scale_2 is {second}, but model.guidance_scale {model.guidance_scale} switches "
            "guidance off for both transformers. Set model.guidance_scale above 1, or remove guidance_scale_2."
        )


def _takes_guidance(path: str) -> bool:
    """Return whether a denoiser has an input for guidance; True if its config is on no disk and in no table here."""
    network, name = architecture_of(path), "guidance_embeds"
    return network is None or bool(network.config.get(name, settings_of(network.denoiser).get(name)))
