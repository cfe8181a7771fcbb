"""Device memory of a denoiser's run, phase by phase, from the model's architecture alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import architecture_of, decoder_parameters, meta_denoiser
from flowmill.models.memory.denoisers import DenoiserMemory, measured_denoiser
from flowmill.models.memory.published import Architecture
from flowmill.models.policies.parts import Part
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.quantized import dequantizing_bytes, largest_layer, quantized_bytes, weight_bytes
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.row_tokens import image_tokens, text_tokens
from flowmill.tasks.modalities.diffusion.trained_rewards import decoded_parts, rows_at_once
from flowmill.tasks.modalities.memory import (
    BYTES,
    MASTER,
    READ_AHEAD,
    REWARD_MODELS,
    DrawingMemory,
    Memory,
    OptimizerSizes,
    RewardMemory,
    Sizes,
    host_memory,
)

#: The option for the length of texts; families without it use CLIP's length.
_LENGTH, _CLIP = "max_sequence_length", 77
_NOTE = "memory: activations of the gradient of reward '{}' are not counted; leave room for them."
_PHASES = ("encode", "rollout", "decode", "gradient", "optimize")


def denoiser_memory(plan: ResolvedConfig, optimizer: OptimizerSizes, *, reference: bool) -> Memory | None:
    """Return the memory of a rank; None if the architecture is unknown (a model to build, or not published here). See
    ``Modality.memory`` for the arguments."""
    config, requires, family = plan.config, plan.requires, plan.family
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    module, spec = meta_denoiser(architecture), plan.lora
    model, execution, number = config.model, config.execution, BYTES[config.model.dtype]
    base = weight_bytes(module, model.quantizer, number) * architecture.denoisers
    text, reading = _text_bytes(config, architecture)
    decoder = decoder_parameters(architecture) * MASTER
    role = Sizes(config, optimizer, spec).role(
        module,
        family.blocks,
        dtype=model.dtype,
        copies=int(config.optimize.ema is not None) + int(requires.behavior),
        models=architecture.denoisers,
        frozen=base * (int(reference and spec is None) + len(requires.teachers)),
        quantizer=model.quantizer,
    )
    traces, rows = partial(_traces, architecture=architecture, spec=spec), decode_rows(config)
    sampled, larger, trained = traces(config), traces(plan.evaluated.config), traces(config, guided=requires.guided)
    training, retained = trained.training(execution.micro_batch_size)
    gradients = _gradients(config, requires, sampled, decoder=decoder, retained=retained)
    encodes = Part.VAE in family.parts_to_encode(model.options)
    # Encoding a prompt's images, one at a time, takes at most the memory of decoding one.
    images = max(each.decoding(1) for each in (sampled, larger)) if encodes else 0
    parts = {
        "text": text + encodes * decoder,
        "encode_activations": _encoding(plan, architecture, number) + reading + images,
        "sampling_weights": role.spread if execution.sampling == "spread" else role.whole,
        "decoder": decoder,
        "rollout_activations": max(each.sampling(execution.rollout_batch_size) for each in (sampled, larger)),
        "decode_activations": max(each.decoding(rows) for each in (sampled, larger)),
        "training_weights": role.spread,
        "training_state": role.state,
        # Each forward of a micro-batch keeps its own activations.
        "optimize_activations": (training + (requires.calls - 1) * retained) // execution.context_parallel,
        "step": role.step,
    }
    read = max(text, 0 if execution.holders > 1 else base + decoder)
    ahead = READ_AHEAD * execution.micro_batch_size * trained.stored()
    lines = _lines(parts, gradients)
    return Memory(
        parameters=role.parameters,
        trained=role.trained,
        tokens=image_tokens(plan, architecture) + text_tokens(plan, architecture),
        names=tuple(name for name in _PHASES if name in lines["weights"]),
        lines=lines,
        between=parts["sampling_weights"] + decoder,
        host=host_memory([role], read=read, **{"autoencoder at rest": decoder, "batches read ahead, pinned": ahead}),
        details={**parts, "asked": gradients},
        notes=tuple(map(_NOTE.format, (gradients or {}).get("unknown", ()))),
    )


def drawing_memory(plan: ResolvedConfig) -> DrawingMemory | None:
    """Return the memory of a frozen model that renders texts; None if the architecture is unknown."""
    config = plan.config
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    execution, number = config.execution, BYTES[config.model.dtype]
    module, quantizer = meta_denoiser(architecture), config.model.quantizer
    denoisers = weight_bytes(module, quantizer, number) * architecture.denoisers
    layer = dequantizing_bytes(quantizer, largest_layer(module, quantizer), number)
    text, reading = _text_bytes(config, architecture)
    # Fully trained weights would be cast for every forward; with the smallest adapters they keep their dtype.
    traces = _traces(config, architecture, LoraSpec(rank=1, alpha=1, targets=tuple(plan.family.lora_targets)))
    return DrawingMemory(
        weights=denoisers + text + decoder_parameters(architecture) * MASTER,
        work=max(traces.sampling(execution.rollout_batch_size) + layer, reading, traces.decoding(decode_rows(config))),
    )


def _traces(
    config: RunConfig, architecture: Architecture, spec: LoraSpec | None, *, guided: bool = True
) -> DenoiserMemory:
    return measured_denoiser(config, architecture, spec, guided=guided and uses_guidance(config))


def _text_bytes(config: RunConfig, architecture: Architecture) -> tuple[int, int]:
    """Return the bytes of text encoders, and of dequantizing their largest layer."""
    model, text, number = config.model, architecture.text, BYTES[config.model.dtype]
    quantizer = None if model.quantize is None else model.quantize.text_encoders
    if quantizer is None:
        return architecture.text_parameters * number, 0
    rows = (architecture.text_parameters - text.embedded) // text.width
    weights = text.embedded * number + quantized_bytes(quantizer, rows, text.width, number)
    return weights, dequantizing_bytes(quantizer, text.width * text.inner, number)


def _encoding(plan: ResolvedConfig, architecture: Architecture, number: int) -> int:
    """Return the bytes of a batch of prompts in the largest text encoder, with ``number`` bytes per value."""
    tokens = getattr(plan.model_options, _LENGTH, _CLIP)
    return plan.config.execution.encode_batch_size * architecture.text.row(tokens, number)


def _gradients(
    config: RunConfig, requires: Requirements, traces: DenoiserMemory, *, decoder: int, retained: int
) -> dict[str, Any] | None:
    """Return the bytes of reward gradients, None if the algorithm needs none: of decoder and rewards, and their
    activations for the rows of one call."""
    if not requires.rewards and not requires.gradients:
        return None
    # The stage computes one reward at a time; training computes all of them, once per prompt of a question.
    groups = [config.rewards] if requires.rewards else [[section] for section in config.rewards]
    rewards = [RewardMemory.of(group) for group in groups]
    rows, looks = rows_at_once(config) if requires.rewards else decode_rows(config), bool(decoded_parts(config))
    scoring = max((each.followed for each in rewards), default=0)
    return {
        "training": bool(requires.rewards),
        "decoder": decoder if looks else 0,
        "models": max((each.weights for each in rewards), default=0),
        "work": looks * traces.following(rows) + rows * max(1, requires.rewards) * scoring,
        "kept": requires.calls * retained // config.execution.context_parallel if requires.rewards else 0,
        "unknown": tuple(label for each in rewards for label in each.unfollowed),
    }


def _lines(parts: dict[str, int], gradients: dict[str, Any] | None) -> dict[str, dict[str, int]]:
    sampling, decoder = parts["sampling_weights"], parts["decoder"]
    weights = {"encode": parts["text"], "rollout": sampling, "decode": sampling, "optimize": parts["training_weights"]}
    autoencoder, models = {"rollout": decoder, "decode": decoder}, dict[str, int]()
    work = {name: parts[f"{name}_activations"] for name in ("encode", "rollout", "decode", "optimize")}
    work["optimize"] = max(work["optimize"], parts["step"])
    if gradients is not None and gradients["training"]:
        autoencoder["optimize"], models = gradients["decoder"], {"optimize": gradients["models"]}
        # Decoder and rewards run between the policy's forward and its backward.
        work["optimize"] = max(work["optimize"], gradients["kept"] + gradients["work"])
    elif gradients is not None:
        weights["gradient"], autoencoder["gradient"] = sampling, decoder
        work["gradient"], models = gradients["work"], {"gradient": gradients["models"]}
    return {
        "weights": weights,
        "autoencoder": autoencoder,
        **({REWARD_MODELS: models} if any(models.values()) else {}),
        "gradients, moments, averages": {"optimize": parts["training_state"]},
        "activations": work,
    }
