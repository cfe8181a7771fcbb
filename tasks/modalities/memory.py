"""Device memory of a run for any kind of policy: the estimate, and the sizes of trained models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowmill.configs.execution import ExecutionSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import parameters
from flowmill.models.rewards.factory import needs_of, takes_of, works_on_accelerator
from flowmill.models.weights.lora import LoraSpec, adapted_parameters, check_lora_targets, lora_parameters, within
from flowmill.models.weights.quantized import dequantizing_bytes, largest_layer, weight_bytes
from flowmill.models.weights.sharding import units

if TYPE_CHECKING:
    from torch import nn

#: Bytes per value by dtype.
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes per trained value, and per value of its gradient and copies: all float32.
MASTER = 4
#: Blocks that ``fully_shard`` gathers at a time: the active one and the next.
WHOLE_BLOCKS = 2
#: Name of reward models in accounts.
REWARD_MODELS = "models of rewards"
#: The phase in which samples are scored.
SCORE = "score"
#: Micro-batches in host memory while training: the active one and the prefetched ones.
READ_AHEAD = 3
#: Maximum values per optimizer step group if parameters or moments are in host memory; a larger parameter is alone.
AT_A_TIME = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """Sizes of an optimizer's state."""

    moment_bytes: float
    """Bytes per value of one moment."""
    step_bytes: int
    """Bytes per value that a step needs besides moments and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingMemory:
    """Memory of a frozen model that renders texts, in bytes."""

    weights: int
    """Text encoders, denoisers and autoencoder."""
    work: int
    """Activations of a forward or of decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMemory:
    """Device memory of reward models that work at the same time, in bytes."""

    weights: int
    """Weights of all models."""
    activations: int
    """Activations of the largest call."""
    followed: int
    """Activations of one row with gradients, of all models."""
    unknown: tuple[str, ...]
    """Labels of rewards whose models are not counted."""
    unfollowed: tuple[str, ...]
    """Labels of rewards whose gradients are not counted."""

    @classmethod
    def of(cls, sections: Sequence[RewardSection]) -> RewardMemory:
        """Return the memory of rewards on the accelerator of a rank."""
        weights, activations, followed, unknown, unfollowed = {}, 0, 0, [], []
        for section in filter(works_on_accelerator, sections):
            taken = takes_of(section.name, section.options)
            if taken is None or not taken.followed:
                unfollowed.append(section.slot)
            if taken is None:
                unknown.append(section.slot)
                continue
            # Labels of the same model share it.
            weights[section.name, repr(section.options), section.device] = taken.weights
            rows = section.batch_size or needs_of(section.name, section.options).batch_size or 1
            activations = max(activations, rows * taken.row)
            followed += taken.followed or 0
        return cls(
            weights=sum(weights.values()),
            activations=activations,
            followed=followed,
            unknown=tuple(unknown),
            unfollowed=tuple(unfollowed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Estimates for one rank, in bytes."""

    parameters: int
    """Parameters of the policy."""
    trained: int
    """Trained parameters: adapters, or all."""
    tokens: int
    """Maximum tokens of one row."""
    names: tuple[str, ...]
    """Names of the phases."""
    lines: Mapping[str, Mapping[str, int]]
    """The parts of the memory by label and phase."""
    between: int
    """Device memory that stays in use while samples are scored."""
    host: Mapping[str, int]
    """Host memory by content, the maximum of one rank."""
    details: Mapping[str, Any]
    """Parts of the lines, by the names of the JSON output."""
    notes: tuple[str, ...] = ()
    """Omissions of the estimate, a sentence each."""

    @property
    def phases(self) -> dict[str, int]:
        """Memory of each phase."""
        return {name: sum(line.get(name, 0) for line in self.lines.values()) for name in self.names}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        sizes = {"parameters": self.parameters, "trained": self.trained, "tokens": self.tokens}
        return {**sizes, **self.details, **self.phases, "host": dict(self.host)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMemory:
    """Placement of a rank's trained state, in bytes."""

    weights: int
    """On the device."""
    state: int
    """Gradients, moments and averages on the device."""
    host: int
    """In host memory."""
    pinned: int
    """The pinned part of it: parameters and gradients, and moments that move to the device for a step."""
    saved: int
    """Gradients, moments and averages, on the device or in host memory."""

    @classmethod
    def of(
        cls, execution: ExecutionSection, optimizer: OptimizerSizes, *, weights: int, trained: int, copies: int
    ) -> PlacedMemory:
        """Return the placement under ``execution.offload``.

        Args:
            optimizer: sizes of the optimizer's state.
            weights: bytes of all weights, over all ranks.
            trained: number of trained values.
            copies: float32 copies of the trained values next to the weights: gradients and averages.
        """
        parts, moments = execution.holders, 2 * optimizer.moment_bytes * trained
        own, saved, rest = weights // parts, int(trained * MASTER * copies + moments) // parts, int(moments) // parts
        pinned = own + trained * MASTER // parts
        if not execution.offload:
            return cls(weights=own, state=saved, host=0, pinned=0, saved=saved)
        if execution.offload is True:
            return cls(weights=0, state=0, host=own + saved, pinned=pinned, saved=saved)
        if execution.parameters_in_host:
            return cls(weights=0, state=rest, host=own + saved - rest, pinned=pinned, saved=saved)
        return cls(weights=own, state=saved - rest, host=rest, pinned=rest, saved=saved)

    @property
    def lines(self) -> Mapping[str, int]:
        """Its host memory by label."""
        return {"offloaded, pinned": self.pinned, "offloaded": self.host - self.pinned}


def step_bytes(config: RunConfig, trained: int, parts: int, optimizer: OptimizerSizes) -> int:
    """Return the bytes of the gradient exchange and the optimizer's step, after activations are freed.

    Args:
        trained: number of trained values.
        parts: ranks that the values are sharded over.
        optimizer: sizes of the optimizer's state.
    """
    execution = config.execution
    # With ddp the gradient exchange uses one buffer.
    exchange = trained * MASTER if execution.ranks > 1 and execution.strategy == "ddp" else 0
    if not execution.offload:
        return exchange + trained * optimizer.step_bytes // parts
    if execution.offload is True:
        return 0
    brought = 2 * (MASTER if execution.parameters_in_host else optimizer.moment_bytes)
    return exchange + int(min(trained // parts, AT_A_TIME) * (optimizer.step_bytes + brought))


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The sizes of one trained model, on one rank."""

    parameters: int
    """Number of parameters."""
    trained: int
    """Number of trained parameters."""
    whole: int
    """Bytes of weights outside of training: whole weights, a dequantized layer, with sharding also this rank's part."""
    spread: int
    """Bytes of weights while training: with fsdp this rank's part, and gathered blocks; a dequantized layer."""
    state: int
    """Bytes of gradients, moments, and copies of trained parameters."""
    placed: PlacedMemory
    """Placement of weights and state."""
    step: int
    """Bytes of the gradient exchange and the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Computes the sizes of models on one rank under a config."""

    config: RunConfig
    optimizer: OptimizerSizes
    """Sizes of its optimizer's state."""
    spec: LoraSpec | None
    """Adapters; None: all weights are trained."""

    def role(
        self,
        module: nn.Module,
        blocks: Sequence[str],
        *,
        dtype: str,
        copies: int,
        head: nn.Module | None = None,
        models: int = 1,
        frozen: int = 0,
        untrained: Sequence[str] = (),
        quantizer: str | None = None,
    ) -> Role:
        """Return the sizes of a trained model.

        Args:
            module: the model, without weights.
            blocks: names of its block lists.
            dtype: dtype of frozen weights.
            copies: number of float32 copies of trained parameters.
            head: a part of it that is trained whole; adapters are on the other parts, if there are any.
            models: number of models of these sizes, of which one computes at a time.
            frozen: bytes of further frozen weights that are placed as the model's are.
            untrained: names of parts of the model that are not trained.
            quantizer: that of its frozen weights.
        """
        config, number, parts = self.config, BYTES[dtype], self.config.execution.holders
        total = parameters(module)
        # A model that is only a head has no layers for adapters.
        of_head = 0 if head is None else parameters(head)
        lora = None if of_head == total else self.spec
        trained = sum(p.numel() for name, p in module.named_parameters() if not within(name, untrained))
        weights = trained * MASTER + (total - trained) * number
        if lora is not None:
            check_lora_targets(type(module).__name__, module, lora.targets, lora.untrained)
            trained = lora_parameters(module, lora) + of_head
            summed = dtype == "float32" and config.execution.strategy != "fsdp" and quantizer is None
            weights = trained * MASTER + weight_bytes(module, quantizer, number)
            weights += adapted_parameters(module, lora) * number if summed else 0
        each = [parameters(unit) for unit in units(module, blocks)]
        # Parameters outside of blocks, such as embeddings and the head, stay gathered during a forward.
        at_work = total - sum(each) + WHOLE_BLOCKS * max(each, default=0)
        working = at_work * (MASTER if lora is None else number) if parts > 1 else 0
        all_weights, trained = models * weights + frozen, models * trained
        # One layer at a time is dequantized.
        layer = dequantizing_bytes(quantizer, largest_layer(module, quantizer), number)
        placed = PlacedMemory.of(
            config.execution, self.optimizer, weights=all_weights, trained=trained, copies=1 + copies
        )
        return Role(
            parameters=models * total,
            trained=trained,
            whole=all_weights + layer + (placed.weights if parts > 1 else 0),
            spread=working + layer + placed.weights,
            state=placed.state,
            placed=placed,
            step=step_bytes(config, trained, parts, self.optimizer),
        )


def host_memory(roles: Sequence[Role], *, read: int, **further: int) -> dict[str, int]:
    """Return the host memory of trained models by content.

    Args:
        roles: the models.
        read: bytes of models while they are read.
        further: bytes of other contents, by label.
    """
    sizes = {
        "models while they are read": read,
        "checkpoints": sum(role.placed.saved for role in roles),
        **further,
        **{label: sum(role.placed.lines[label] for role in roles) for label in roles[0].placed.lines},
    }
    return {label: size for label, size in sizes.items() if size}
