"""What a run needs of a GPU: parameters and memory per rank, estimated from the model's architecture alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from configs.registry import resolve
from configs.schema import RunConfig
from models.architectures import (
    architecture_of,
    lora_parameters,
    meta_denoiser,
    parameters,
    width_and_depth,
)
from models.policies import POLICIES
from tasks.prompts import uses_guidance

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Numbers a transformer block keeps for its backward pass, per token and width (Korthikanti et al., arXiv 2205.05198,
#: without attention scores, which fused attention does not keep).
_PER_BLOCK = 17
#: Autoencoders of these families, decoding one image or clip at a time, with room for its activations.
_DECODER_GB = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Estimates for one rank, in bytes."""

    parameters: int
    """Of all denoisers."""
    trained: int
    """Of what is trained: adapters, or all."""
    tokens: int
    """Latent and text tokens of one row."""
    weights: int
    """Frozen (or trained) weights in the forward's dtype."""
    training_state: int
    """Trained weights, gradients, two moments and the moving average, float32, and a frozen copy for a full KL."""
    rollout_activations: int
    """Of one rollout forward of ``execution.rollout_batch_size`` rows."""
    optimize_activations: int
    """Kept for the backward pass of ``execution.micro_batch_size`` rows."""
    decoder: int
    """Autoencoder while images are decoded."""
    parts: int = 1
    """Ranks that hold the weights together while training."""

    @property
    def rollout(self) -> int:
        """Memory of a rollout."""
        return self.weights + self.rollout_activations + self.decoder

    @property
    def held(self) -> int:
        """Weights and state while training, activations aside; with offloading this is an upper bound."""
        return self.weights // self.parts + self.training_state

    @property
    def optimize(self) -> int:
        """Memory of training."""
        return self.held + self.optimize_activations

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "rollout": self.rollout, "optimize": self.optimize}


def estimate_memory(config: RunConfig, *, reference: bool) -> Memory | None:
    """Return what a rank needs, or None while the architecture is not known (a model to build, or not published here).

    Args:
        config: the config.
        reference: velocities of the base model are needed.
    """
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    family, module = resolve(POLICIES, config.model.policy, what="model.policy"), meta_denoiser(architecture)
    total, lora = parameters(module) * architecture.denoisers, config.model.lora
    trained = total
    if lora is not None:
        targets = tuple(lora.targets or family.lora_targets)
        trained = lora_parameters(module, targets, lora.rank) * architecture.denoisers
    width, depth = width_and_depth(module, family.blocks)
    model, number = config.model, _BYTES[config.model.dtype]
    tokens = architecture.tokens(height=model.height, width=model.width, frames=model.frames) + architecture.text_tokens
    copies = 4 + (1 if config.optimize.ema else 0)
    frozen_copy = total * number if lora is None and reference else 0
    guided = uses_guidance(config)
    joined = 2 if guided and getattr(family, "joint_guidance", False) else 1
    differentiated = 2 if guided and config.optimize.guidance_gradient == "both" else 1
    # While training, a rank holds its part of the weights and of what belongs to them; for sampling they are whole.
    parts = config.execution.ranks if config.execution.strategy == "fsdp" else 1
    block = _PER_BLOCK * tokens * width * number
    kept = (2 * tokens * width * number * depth + block) if config.model.gradient_checkpointing else block * depth
    return Memory(
        parameters=total,
        trained=trained,
        tokens=tokens,
        # Trained float32 weights serve the forward themselves; they count as training state.
        weights=0 if lora is None and number == 4 else total * number,
        training_state=(trained * 4 * copies + frozen_copy) // parts,
        parts=parts,
        rollout_activations=config.execution.rollout_batch_size * joined * block,
        optimize_activations=config.execution.micro_batch_size
        * differentiated
        * kept
        // config.execution.context_parallel,
        decoder=int(_DECODER_GB * 1e9),
    )


def advice(config: RunConfig, memory: Memory, limit: int) -> list[str]:
    """Return what to change so that a run fits ``limit`` bytes per GPU; empty when it does."""
    found = []
    if memory.rollout > limit:
        room = limit - memory.weights - memory.decoder
        rows = room * config.execution.rollout_batch_size // max(1, memory.rollout_activations)
        fits = f"rollout: set execution.rollout_batch_size={rows}"
        found.append(fits if rows >= 1 else "rollout: the weights alone do not fit; take a larger GPU")
    if memory.optimize > limit:
        room = limit - memory.held
        rows = room * config.execution.micro_batch_size // max(1, memory.optimize_activations)
        if rows >= 1:
            found.append(f"optimize: set execution.micro_batch_size={rows}")
        elif not config.model.gradient_checkpointing:
            found.append("optimize: set model.gradient_checkpointing=true")
        elif config.model.lora is None:
            found.append("optimize: train adapters, model.lora={rank: 32, alpha: 64}")
        elif config.model.dtype == "float32":
            found.append("optimize: set model.dtype=bfloat16")
        else:
            found.append("optimize: one row does not fit: lower model.height and model.width, or take a larger GPU")
    return found
