"""GPU memory of a denoiser's run, phase by phase, from the model's architecture alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from flowmill.configs.registry import build, resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import architecture_of, meta_decoder, meta_denoiser, parameters
from flowmill.models.memory.published import Architecture
from flowmill.models.policies import POLICIES
from flowmill.models.weights.quantized import dequantizing_bytes, quantized_bytes, weight_bytes
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import lora_spec
from flowmill.tasks.inputs.row_tokens import image_tokens, text_tokens
from flowmill.tasks.modalities.diffusion.activations import measure_activations, reads_images
from flowmill.tasks.modalities.diffusion.reward_memory import RewardGradientMemory, memory_of_rewards
from flowmill.tasks.modalities.memory import (
    BYTES,
    MASTER,
    READ_AHEAD,
    REWARD_MODELS,
    Memory,
    OptimizerSizes,
    Sizes,
    host_memory,
)

#: The option for the length of texts; families without it use CLIP's length.
_LENGTH, _CLIP = "max_sequence_length", 77
_PHASES = ("encode", "rollout", "decode", "gradient", "optimize")


def denoiser_memory(
    config: RunConfig, requires: Requirements, optimizer: OptimizerSizes, *, reference: bool
) -> Memory | None:
    """Return the memory of a rank; None if the architecture is unknown (a model to build, or not published here).

    Args:
        config: the config.
        requires: its algorithm's needs.
        optimizer: sizes of its optimizer's state.
        reference: velocities of the base model are needed.
    """
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    family, module = resolve(POLICIES, config.model.policy, label="model.policy"), meta_denoiser(architecture)
    model, execution, number = config.model, config.execution, BYTES[config.model.dtype]
    spec = lora_spec(config, family)
    base = weight_bytes(module, model.quantizer, number) * architecture.denoisers
    text, reading = text_bytes(config, architecture)
    role = Sizes(config, optimizer, spec).role(
        module,
        family.blocks,
        dtype=model.dtype,
        copies=int(config.optimize.ema is not None) + int(requires.behavior),
        models=architecture.denoisers,
        frozen=base * (int(reference and spec is None) + len(requires.teachers)),
        quantizer=model.quantizer,
    )
    row = measure_activations(config, architecture, spec, requires)
    decoder = parameters(meta_decoder(architecture)) * MASTER
    gradients = memory_of_rewards(config, requires, row, decoder=decoder)
    # Each forward of a micro-batch keeps its own activations.
    several = (row.training + (requires.calls - 1) * row.retained) // execution.context_parallel
    parts = {
        "text": text + reads_images(config) * decoder,
        "encode_activations": _encoding(config, architecture, number) + reading + row.encoding,
        "sampling_weights": role.spread if execution.sampling == "spread" else role.whole,
        "decoder": decoder,
        "rollout_activations": row.sampling,
        "decode_activations": row.decoding,
        "training_weights": role.spread,
        "training_state": role.state,
        "optimize_activations": several,
        "step": role.step,
    }
    read = max(text, 0 if execution.holders > 1 else base + decoder)
    ahead = READ_AHEAD * execution.micro_batch_size * row.stored
    lines = _lines(parts, gradients)
    return Memory(
        parameters=role.parameters,
        trained=role.trained,
        tokens=image_tokens(config, architecture) + text_tokens(config, architecture),
        names=tuple(name for name in _PHASES if name in lines["weights"]),
        lines=lines,
        between=parts["sampling_weights"] + decoder,
        host=host_memory([role], read=read, **{"autoencoder at rest": decoder, "batches read ahead, pinned": ahead}),
        details={**parts, "asked": gradients and asdict(gradients)},
        notes=() if gradients is None else gradients.notes,
    )


def text_bytes(config: RunConfig, architecture: Architecture) -> tuple[int, int]:
    """Return the bytes of text encoders, and of dequantizing their largest layer."""
    model, text, number = config.model, architecture.text, BYTES[config.model.dtype]
    quantizer = None if model.quantize is None else model.quantize.text_encoders
    if quantizer is None:
        return architecture.text_parameters * number, 0
    rows = (architecture.text_parameters - text.embedded) // text.width
    weights = text.embedded * number + quantized_bytes(quantizer, rows, text.width, number)
    return weights, dequantizing_bytes(quantizer, text.width * text.inner, number)


def _lines(parts: Mapping[str, int], gradients: RewardGradientMemory | None) -> dict[str, dict[str, int]]:
    """Return the parts of the memory by label and phase."""
    sampling, decoder = parts["sampling_weights"], parts["decoder"]
    weights = {"encode": parts["text"], "rollout": sampling, "decode": sampling, "optimize": parts["training_weights"]}
    autoencoder, models = {"rollout": decoder, "decode": decoder}, dict[str, int]()
    work = {name: parts[f"{name}_activations"] for name in ("encode", "rollout", "decode", "optimize")}
    work["optimize"] = max(work["optimize"], parts["step"])
    if gradients is not None and gradients.training:
        autoencoder["optimize"], models = gradients.decoder, {"optimize": gradients.models}
        # Decoder and rewards run between the policy's forward and its backward.
        work["optimize"] = max(work["optimize"], gradients.kept + gradients.work)
    elif gradients is not None:
        weights["gradient"], autoencoder["gradient"] = sampling, decoder
        work["gradient"], models = gradients.work, {"gradient": gradients.models}
    return {
        "weights": weights,
        "autoencoder": autoencoder,
        **({REWARD_MODELS: models} if any(models.values()) else {}),
        "gradients, moments, averages": {"optimize": parts["training_state"]},
        "activations": work,
    }


def _encoding(config: RunConfig, architecture: Architecture, number: int) -> int:
    """Return the bytes of a batch of prompts in the largest text encoder, with ``number`` bytes per value."""
    model, family = config.model, resolve(POLICIES, config.model.policy, label="model.policy")
    tokens = getattr(build(family.options_type, model.policy, model.options, label="model.options of"), _LENGTH, _CLIP)
    return config.execution.encode_batch_size * architecture.text.row(tokens, number)
