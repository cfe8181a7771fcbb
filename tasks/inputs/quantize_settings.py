"""Checks of quantized base models against the family, the device and the other settings."""

from __future__ import annotations

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.folder_policy import FolderPolicy
from flowmill.models.weights.quantized import check_quantizer
from flowmill.tasks.inputs.resolved import ResolvedConfig


def check_quantize(plan: ResolvedConfig) -> None:
    """Check that a model can be quantized where it is loaded."""
    config = plan.config
    model, execution, section = config.model, config.execution, config.model.quantize
    if section is None:
        return
    pipeline = issubclass(plan.family, FolderPolicy)
    if section.name is None and section.text_encoders is None:
        raise ConfigError("model.quantize names no quantizer. Set its name or text_encoders, or remove it.")
    if section.text_encoders is not None and not pipeline:
        raise ConfigError(
            f"model.quantize.text_encoders is '{section.text_encoders}', but model.policy '{model.policy}' has no text "
            "encoders. Remove it; model.quantize.name quantizes the model itself."
        )
    if model.compile:
        raise ConfigError(
            "model.compile is set, but quantized layers of model.quantize are not compiled. Remove one of them."
        )
    if section.name is not None and execution.strategy == "fsdp":
        raise ConfigError(
            "execution.strategy is 'fsdp', which cannot shard the packed weights of model.quantize. Set it to 'ddp' "
            "or remove model.quantize.name."
        )
    # A config may be checked on another machine than the one it is for.
    device = "cuda" if execution.device == "auto" else execution.device.split(":")[0]
    if section.name is not None:
        check_quantizer(section.name, "diffusers" if pipeline else "transformers", device)
    if section.text_encoders is not None:
        check_quantizer(section.text_encoders, "transformers", device)


def check_frozen(config: RunConfig) -> None:
    """Check that a quantized model is not trained itself."""
    if config.model.quantizer is not None and config.model.lora is None:
        raise ConfigError(
            f"model.quantize.name is '{config.model.quantizer}', but the run trains all weights, and "
            "quantized ones cannot be trained. Set model.lora to train adapters, or remove model.quantize.name."
        )
