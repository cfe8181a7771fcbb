"""Trained weights (LoRA or full), and the frozen reference and teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from flowmill.configs.errors import CorruptError
from flowmill.models.policies.base import Policy
from flowmill.models.policies.compute_meter import Meter
from flowmill.models.weights.lora import LoraSpec, add_lora, use_adapters, within
from flowmill.models.weights.merging import Merged
from flowmill.models.weights.quantized import check_trains
from flowmill.models.weights.sharding import Sharding, exchange, gather, scatter, whole


class Trainable:
    """The trained parameters of a policy, and its reference and teachers."""

    def __init__(self, policy: Policy, lora: LoraSpec | None, *, seed: int) -> None:
        """Make a freshly loaded policy trainable; raise ConfigError if a LoRA target matches no module, or quantized
        weights were to be trained. ``policy``: its trained modules are changed in place; ``lora``: adapters to add, or
        None to train all weights."""
        self.policy = policy
        self.lora = lora
        self._sharding: Sharding | None = None
        self._gathered = False
        self._reference: dict[str, nn.Module] | None = None
        self._start: Sequence[Path] | None = None
        #: Adapters of the reference, whole and as this rank's parts.
        self._start_values: dict[bool, list[Tensor]] = {}
        self._teachers: dict[str, dict[str, nn.Module]] = {}
        self.merged: Merged | None = None
        """The factors of adapted layers, if they can be merged."""
        for name, module in policy.trained.items():
            if lora is None:
                for key, parameter in module.named_parameters():
                    check_trains(f"{name}.{key}", parameter)
                    parameter.requires_grad_(not within(key, policy.untrained))
            else:
                add_lora(name, module, lora, seed=seed)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()
        if lora is not None and policy.settings.dtype == torch.float32:
            self.merged = Merged(policy.trained.values(), policy.entered)

    @property
    def sharded(self) -> bool:
        """True if the weights are sharded over ranks: every rank must then call the models equally often."""
        return self._sharding is not None

    @property
    def gathered(self) -> bool:
        """True while sharded weights are whole on every rank."""
        return self._gathered

    def shard(self, sharding: Sharding) -> None:
        """Shard the weights over ranks, including those of a reference or teacher set later. A policy created with
        ``empty`` reads this rank's part of its weights now."""
        self._sharding = sharding
        if self.merged is not None:
            self.merged.remove()
            self.merged = None
        _spread(self.policy, sharding)
        self.policy.lockstep = True

    def gather(self) -> None:
        """Gather whole weights on every rank, for sampling: the ranks then need not call the models together."""
        if self.sharded and not self._gathered:
            for module in self.modules():
                gather(module)
            self._gathered, self.policy.lockstep = True, False

    def scatter(self) -> None:
        """Shard gathered weights over the ranks again."""
        if self._gathered:
            for module in self.modules():
                scatter(module)
            self._gathered, self.policy.lockstep = False, True

    def modules(self) -> list[nn.Module]:
        """Return all modules: the policy's trained ones, and those of a reference and teachers."""
        further = (module for modules in self.frozen.values() for module in modules.values())
        return [*self.policy.trained.values(), *further]

    def measure(self, meter: Meter) -> None:
        """Count the computation of all modules from now on, including a reference or teacher set later."""
        self.policy.meter = meter
        for modules in (self.policy.trained, *self.frozen.values()):
            self._measure(modules)

    def _measure(self, modules: Mapping[str, nn.Module]) -> None:
        if self.policy.meter is not None:
            self.policy.meter.watch(modules)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (denoiser.parameter, parameter) of all trained parameters, in a fixed order."""
        for name, module in self.policy.trained.items():
            for key, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{key}", parameter

    def parameters(self) -> list[nn.Parameter]:
        """Return all trained parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def changed(self) -> None:
        """Invalidate merged weights after a parameter update: a fused optimizer does not bump versions."""
        if self.merged is not None:
            self.merged.forget()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the full shapes of the trained parameters, by name."""
        return {name: parameter.shape for name, parameter in self.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters, float32 on CPU; if sharded, all ranks must call this together."""
        return {name: whole(p.detach()).to("cpu", torch.float32, copy=True) for name, p in self.named_parameters()}

    def read(self, files: Sequence[Path] | None) -> None:
        """Load the trained parameters from files, see ``fill``."""
        self.fill(dict(self.named_parameters()), files)

    def fill(self, targets: Mapping[str, Tensor], files: Sequence[Path] | None) -> None:
        """Fill tensors shaped like the trained parameters from files; if sharded, each rank reads its part. Raises
        CorruptError if names or shapes differ from the trained ones. ``files``: one file of whole parameters, or the
        parts that several ranks wrote; None: the base model's weights."""
        if files is None:
            for name, stored in self.policy.stored.items():
                own = [key for key in targets if key.startswith(f"{name}.")]
                stored.read({key.removeprefix(f"{name}."): targets[key] for key in own})
            return
        from flowmill.models.weights.tensor_files import TensorFiles

        stored_files = TensorFiles(files)
        shapes = stored_files.shapes
        if set(targets) != set(shapes):
            odd = sorted(set(targets) ^ set(shapes))[0]
            raise CorruptError(f"The stored policy and the model differ in trained parameters, the first is '{odd}'.")
        for name, target in targets.items():
            if target.shape != shapes[name]:
                raise CorruptError(f"Stored '{name}' has shape {tuple(shapes[name])}, the model {tuple(target.shape)}.")
        stored_files.read_into(targets)

    @property
    def needs_reference(self) -> bool:
        """True if ``set_reference`` must be called; with LoRA, the reference is the policy with other adapters."""
        return self.lora is None and self._reference is None

    def give_reference(self, base: Callable[[], Policy], start: Sequence[Path] | None) -> None:
        """Make the reference, unless it is there. ``base``: loads the base model; ``start``: files of the weights or
        adapters that training started from, which those of the reference are then; None: those of the base model."""
        self._start = start
        if self.needs_reference:
            self.set_reference(base())

    def set_reference(self, base: Policy) -> None:
        """Set the frozen base model as the reference of full weights; equal weights give equal velocities."""
        self._reference = self._add(base, _computed_as_trained, self._start)
        self._measure(self._reference)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Names of the teachers; a single teacher has the empty name."""
        return tuple(self._teachers)

    @property
    def frozen(self) -> dict[str, Mapping[str, nn.Module]]:
        """Modules of the reference and teachers, by role."""
        teachers = {f"teacher {name}".strip(): modules for name, modules in self._teachers.items()}
        return {"reference": self._reference or {}, **teachers}

    def set_teacher(self, teacher: Policy, name: str = "") -> None:
        """Add a frozen teacher, a model of the same family; equal weights give equal velocities."""
        self._teachers[name] = self._add(teacher, _computed_as_trained if self.lora is None else _frozen)
        self._measure(self._teachers[name])

    def _add(
        self, other: Policy, prepare: Callable[[nn.Module], nn.Module], files: Sequence[Path] | None = None
    ) -> dict[str, nn.Module]:
        modules = {name: prepare(module) for name, module in other.trained.items()}
        if self._sharding is not None:
            _spread(other, self._sharding)
        if files is not None:
            named = ((name, module.named_parameters()) for name, module in modules.items())
            self.fill({f"{name}.{key}": each for name, parameters in named for key, each in parameters}, files)
        if self._gathered:
            for module in modules.values():
                gather(module)
        return modules

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Swap in other values inside the context, in the order of ``parameters``, without a copy. Contents of sharded
        parameters are exchanged in place: gathering refers to their memory."""
        parameters = self.parameters()
        if self.sharded:
            exchange(parameters, values)
            try:
                yield
            finally:
                exchange(parameters, values)
            return
        own = [parameter.data for parameter in parameters]
        try:
            self._exchange(parameters, values)
            yield
        finally:
            self._exchange(parameters, own)

    def _exchange(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        self.changed()

    @contextmanager
    def reference_adapters(self) -> Iterator[None]:
        """Use the adapters that training started from inside the context, or none."""
        if self._start is not None:
            if self._gathered not in self._start_values:
                values = {name: torch.empty_like(parameter.detach()) for name, parameter in self.named_parameters()}
                self.fill(values, self._start)
                self._start_values[self._gathered] = list(values.values())
            with self.holding(self._start_values[self._gathered]):
                yield
            return
        for module in self.policy.trained.values():
            use_adapters(module, False)
        try:
            yield
        finally:
            for module in self.policy.trained.values():
                use_adapters(module, True)


def _spread(policy: Policy, sharding: Sharding) -> None:
    """Shard a policy's modules over the ranks, and read this rank's part of weights that were not read yet."""
    sharding.shard(policy.trained.values(), policy.blocks, policy.untrained)
    if policy.settings.empty:
        for name, module in policy.trained.items():
            policy.stored[name].give(module, sharding.device)


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


def _computed_as_trained(module: nn.Module) -> nn.Module:
    """Freeze a module in place so that its forward equals, bit for bit, that of trained float32 copies of its weights.

    Under autocast, linear and convolution layers round weights of any dtype to the forward's dtype. All other layers
    (norms, embeddings, tables) compute in the dtype of their weights, which must then be float32 here too: a bfloat16
    norm weight alone gives a KL to the base model of 1e-5 before any training.
    """
    for layer in module.modules():
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return _frozen(module)
