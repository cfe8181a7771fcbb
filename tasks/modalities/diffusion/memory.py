"""GPU memory of a denoiser's run, phase by phase, from the model's architecture alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from configs.registry import build, resolve
from configs.schema import RunConfig
from models.memory.architectures import (
    architecture_of,
    meta_decoder,
    meta_denoiser,
    parameters,
)
from models.memory.published import Architecture
from models.policies import MODULAR, POLICIES
from models.policies.parts import Part
from models.weights.lora import LoraSpec, adapted_parameters, lora_parameters
from models.weights.sharding import units
from tasks.algorithms.base import Requirements
from tasks.inputs.components import lora_spec
from tasks.inputs.row_tokens import image_tokens, text_tokens
from tasks.modalities.diffusion.activations import Activations, measure_activations
from tasks.modalities.diffusion.reward_memory import Asked, asked_memory, fewer_at_once
from tasks.modalities.diffusion.trained_rewards import rows_at_once
from tasks.modalities.memory import (
    BYTES,
    MASTER,
    READ_AHEAD,
    REWARD_MODELS,
    WHOLE_BLOCKS,
    OptimizerSizes,
    Placed,
    less_to_sample,
    step_bytes,
)

if TYPE_CHECKING:
    import torch

#: The option for the length of texts; families without it use CLIP's length.
_LENGTH, _CLIP = "max_sequence_length", 77


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserMemory:
    """Estimates for one rank, in bytes."""

    parameters: int
    """Parameters of all denoisers."""
    trained: int
    """Trained parameters: adapters, or all."""
    tokens: int
    """Latent and text tokens of one row."""
    text: int
    """Text encoders, and the autoencoder if images are encoded too; only ``encode`` holds them."""
    encode_activations: int
    """Activations of encoding ``execution.encode_batch_size`` prompts, and an image."""
    sampling_weights: int
    """Denoisers and further models while sampling: whole on every rank, or sharded as in training."""
    decoder: int
    """The autoencoder, while images are sampled and decoded."""
    rollout_activations: int
    """Activations of one forward of ``execution.rollout_batch_size`` rows."""
    decode_activations: int
    """Activations of decoding ``execution.decode_batch_size`` images or clips."""
    training_weights: int
    """Denoisers and further models while training: with fsdp this rank's part, and gathered blocks."""
    training_state: int
    """Gradients, two moments, a moving average and a behavior policy."""
    optimize_activations: int
    """Kept for the backward pass of ``execution.micro_batch_size`` rows."""
    step: int
    """Gradient exchange and optimizer step, after the activations are freed."""
    host: dict[str, int]
    """Host memory, by content."""
    asked: Asked | None = None
    """Reward gradients, if they are computed."""

    @property
    def encode(self) -> int:
        """Memory of encoding prompts."""
        return self.text + self.encode_activations

    @property
    def between(self) -> int:
        """Device memory that stays in use while samples are scored."""
        return self.sampling_weights + self.decoder

    @property
    def rollout(self) -> int:
        """Memory of sampling."""
        return self.sampling_weights + self.decoder + self.rollout_activations

    @property
    def decode(self) -> int:
        """Memory of decoding samples."""
        return self.sampling_weights + self.decoder + self.decode_activations

    @property
    def gradient(self) -> int:
        """Memory of the separate stage of reward gradients; 0 if there is none."""
        return self.between + self.asked.models + self.asked.work if self.asked and not self.asked.training else 0

    @property
    def held(self) -> int:
        """Weights and state while training, including rewards that are called during training."""
        asked = self.asked.weights if self.asked and self.asked.training else 0
        return self.training_weights + self.training_state + asked

    @property
    def optimize(self) -> int:
        """Memory of training."""
        # Decoder and rewards run between the policy's forward and its backward.
        asking = self.asked.kept + self.asked.work if self.asked and self.asked.training else 0
        return self.held + max(self.optimize_activations, asking, self.step)

    @property
    def phases(self) -> dict[str, int]:
        """Memory of each phase."""
        followed = {"gradient": self.gradient} if self.gradient else {}
        before = {"encode": self.encode, "rollout": self.rollout, "decode": self.decode}
        return {**before, **followed, "optimize": self.optimize}

    @property
    def lines(self) -> dict[str, dict[str, int]]:
        """The parts of the memory by label and phase."""
        sampling, at_work = self.sampling_weights, self.optimize - self.held
        activations = {
            "encode": self.encode_activations,
            "rollout": self.rollout_activations,
            "decode": self.decode_activations,
            "optimize": at_work,
        }
        weights = {"encode": self.text, "rollout": sampling, "decode": sampling, "optimize": self.training_weights}
        autoencoder, models = {"rollout": self.decoder, "decode": self.decoder}, dict[str, int]()
        if self.asked is not None and self.asked.training:
            autoencoder["optimize"], models = self.asked.decoder, {"optimize": self.asked.models}
        elif self.asked is not None:
            weights["gradient"], autoencoder["gradient"] = sampling, self.decoder
            activations["gradient"], models = self.asked.work, {"gradient": self.asked.models}
        return {
            "weights": weights,
            "autoencoder": autoencoder,
            **({REWARD_MODELS: models} if any(models.values()) else {}),
            "gradients, moments, averages": {"optimize": self.training_state},
            "activations": activations,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on rewards with unknown gradient memory."""
        return () if self.asked is None else self.asked.notes

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), **self.phases}

    def advice(self, config: RunConfig, limit: int) -> list[str]:
        """Return changes that make a run fit ``limit`` bytes per GPU; empty when it does."""
        return _advice(config, self, limit)

    def less_between(self, config: RunConfig) -> str:
        """Return changes that free memory while samples are scored; '' if none of it stays."""
        execution = config.execution
        return "" if execution.ranks == 1 or execution.sampling == "spread" else less_to_sample(config)


def denoiser_memory(
    config: RunConfig,
    requires: Requirements,
    optimizer: OptimizerSizes,
    *,
    reference: bool,
    activations: Activations | None = None,
) -> DenoiserMemory | None:
    """Return the memory of a rank; None if the architecture is unknown (a model to build, or not published here).

    Args:
        config: the config.
        requires: its algorithm's needs.
        optimizer: sizes of its optimizer's state.
        reference: velocities of the base model are needed.
        activations: memory of a row, if already measured.
    """
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    family, module = resolve(POLICIES, config.model.policy, label="model.policy"), meta_denoiser(architecture)
    model, execution, number = config.model, config.execution, BYTES[config.model.dtype]
    total = parameters(module) * architecture.denoisers
    spec = lora_spec(config, family)
    trained, merged = _trained(config, architecture, module, spec)
    further = total * number * (int(reference and spec is None) + len(requires.teachers))
    weights = trained * MASTER + (0 if spec is None else (total + merged) * number) + further
    # While training, a rank holds its part of weights, gradients and moments; while sampling, weights are whole.
    parts = execution.holders
    copies = 1 + int(config.optimize.ema is not None) + int(requires.behavior)
    placed = Placed.of(execution, optimizer, weights=weights, trained=trained, copies=copies)
    blocks = 0
    if parts > 1:
        largest = max(parameters(unit) for unit in units(module, family.blocks))
        blocks = WHOLE_BLOCKS * largest * (MASTER if spec is None else number)
    training = blocks + placed.weights
    # If weights are gathered for sampling, each rank's part of them stays too.
    whole = weights + (placed.weights if parts > 1 else 0)
    row = activations or measure_activations(config, requires)
    assert row is not None
    decoder = parameters(meta_decoder(architecture)) * MASTER
    of_images = Part.VAE in family.parts_to_encode(model.options)
    read = max(architecture.text_parameters * number, 0 if parts > 1 else total * number + decoder)
    return DenoiserMemory(
        parameters=total,
        trained=trained,
        tokens=image_tokens(config, architecture) + text_tokens(config, architecture),
        text=architecture.text_parameters * number + of_images * decoder,
        # A prompt's image is encoded alone, which takes at most the memory of decoding it.
        encode_activations=_encoding(config, architecture, number) + of_images * row.decoding,
        sampling_weights=training if execution.sampling == "spread" else whole,
        decoder=decoder,
        rollout_activations=execution.rollout_batch_size * row.sampling,
        decode_activations=(execution.decode_batch_size or execution.rollout_batch_size) * row.decoding,
        training_weights=training,
        training_state=placed.state,
        optimize_activations=_training(config, requires, row),
        step=step_bytes(config, trained, parts, optimizer),
        host=_host(config, row, placed, read=read, decoder=decoder),
        asked=asked_memory(config, requires, row, decoder=decoder),
    )


def _training(config: RunConfig, requires: Requirements, row: Activations) -> int:
    """Return the memory of a micro-batch's forwards and backwards; each forward keeps its own activations."""
    several = row.training + (requires.calls - 1) * row.kept
    return config.execution.micro_batch_size * several // config.execution.context_parallel


def _trained(
    config: RunConfig, architecture: Architecture, module: torch.nn.Module, spec: LoraSpec | None
) -> tuple[int, int]:
    """Return the number of trained parameters, and of base weights kept in addition to merged ones."""
    if spec is None:
        return parameters(module) * architecture.denoisers, 0
    summed = config.model.dtype == "float32" and config.execution.strategy != "fsdp"
    merged = adapted_parameters(module, spec) if summed else 0
    return lora_parameters(module, spec) * architecture.denoisers, merged * architecture.denoisers


def _host(config: RunConfig, row: Activations, placed: Placed, *, read: int, decoder: int) -> dict[str, int]:
    """Return host memory by content."""
    execution = config.execution
    found = {
        "models while they are read": read,
        "autoencoder at rest": decoder,
        "checkpoints": placed.saved,
        "batches read ahead, pinned": READ_AHEAD * execution.micro_batch_size * row.stored,
        **placed.lines,
    }
    return {name: size for name, size in found.items() if size}


def _encoding(config: RunConfig, architecture: Architecture, number: int) -> int:
    """Return the bytes of a batch of prompts in the largest text encoder, with ``number`` bytes per value."""
    model, family = config.model, resolve(POLICIES, config.model.policy, label="model.policy")
    tokens = getattr(build(family.options_type, model.policy, model.options, label="model.options of"), _LENGTH, _CLIP)
    return config.execution.encode_batch_size * architecture.text.row(tokens, number)


def _advice(config: RunConfig, memory: DenoiserMemory, limit: int) -> list[str]:
    found = []
    if memory.encode > limit:
        found.append(_advice_for_encoding(memory, config, limit))
    if memory.rollout > limit:
        room = limit - memory.sampling_weights - memory.decoder
        rows = room * config.execution.rollout_batch_size // max(1, memory.rollout_activations)
        fits = f"rollout: set execution.rollout_batch_size={rows}"
        found.append(fits if rows >= 1 else f"rollout: the weights alone do not fit; {less_to_sample(config)}")
    if memory.decode > limit >= memory.rollout:
        batch = config.execution.decode_batch_size or config.execution.rollout_batch_size
        rows = (limit - memory.sampling_weights - memory.decoder) * batch // max(1, memory.decode_activations)
        fits = f"decode: set execution.decode_batch_size={rows}"
        found.append(fits if rows >= 1 else "decode: one image or clip does not fit; set model.vae_tiling=true")
    if 0 < limit < memory.gradient:
        found.append(f"gradient: {fewer_at_once(config)}")
    if memory.optimize > limit:
        found.append(f"optimize: {_advice_for_training(config, memory, limit)}")
    return found


def _advice_for_encoding(memory: DenoiserMemory, config: RunConfig, limit: int) -> str:
    if memory.text > limit or config.execution.encode_batch_size == 1:
        placed = "" if config.model.policy in MODULAR else "set model.device_map=balanced, or "
        return f"encode: the text encoders alone do not fit; {placed}take a larger GPU"
    rows = (limit - memory.text) * config.execution.encode_batch_size // max(1, memory.encode_activations)
    return f"encode: set execution.encode_batch_size={max(1, rows)}"


def _advice_for_training(config: RunConfig, memory: DenoiserMemory, limit: int) -> str:
    execution, model = config.execution, config.model
    rows = (limit - memory.held) * execution.micro_batch_size // max(1, memory.optimize_activations)
    if memory.asked is not None and memory.asked.training:
        if rows_at_once(config) > 1:
            return fewer_at_once(config)
        room = limit - memory.held - memory.asked.work
        rows = min(rows, room * execution.micro_batch_size // max(1, memory.asked.kept))
    if rows >= 1 and memory.held + memory.step <= limit:
        return f"set execution.micro_batch_size={rows}"
    if not model.gradient_checkpointing:
        return "set model.gradient_checkpointing=true"
    if execution.ranks > 1 and execution.strategy == "ddp":
        return "set execution.strategy=fsdp"
    if model.lora is None:
        return "train adapters, model.lora={rank: 32, alpha: 64}"
    if model.dtype == "float32":
        return "set model.dtype=bfloat16"
    if execution.strategy == "fsdp" and not execution.offload:
        return "set execution.offload=true"
    return "one row does not fit: lower model.height and model.width, or take a larger GPU"
