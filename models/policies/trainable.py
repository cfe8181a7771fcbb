"""Trained weights (LoRA or full), and the frozen reference and teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from configs.errors import CorruptError
from models.compute_meter import Meter
from models.policies.base import Policy
from models.weights.lora import LoraSpec, add_lora
from models.weights.merging import Merged
from models.weights.sharding import Sharding, exchange, gather, scatter, whole
from models.weights.tensor_files import TensorFiles

if TYPE_CHECKING:
    from torch import Tensor


class Trainable:
    """The trained parameters of a policy, by name, and the switch to the reference policy."""

    def __init__(self, policy: Policy, lora: LoraSpec | None, *, seed: int) -> None:
        """Make a freshly loaded policy trainable.

        Args:
            policy: its trained modules are changed in place.
            lora: adapters to add, or None to train all weights.
            seed: seed of the adapters' initial weights.

        Raises:
            ConfigError: a LoRA target matches no module.
        """
        self.policy = policy
        self.lora = lora
        self._sharding: Sharding | None = None
        self._gathered = False
        self._reference: dict[str, nn.Module] | None = None
        self._teachers: dict[str, dict[str, nn.Module]] = {}
        self.merged: Merged | None = None
        """The factors of adapted layers, if they can be merged."""
        for name, module in policy.trained.items():
            if lora is None:
                module.requires_grad_(True)
            else:
                add_lora(name, module, lora, seed=seed)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()
        if lora is not None and policy.settings.dtype == torch.float32:
            self.merged = Merged(policy.trained.values())

    @property
    def sharded(self) -> bool:
        """True when the weights are spread over ranks: every rank must then call the models equally often."""
        return self._sharding is not None

    @property
    def gathered(self) -> bool:
        """True while spread weights are whole on every rank."""
        return self._gathered

    def shard(self, sharding: Sharding) -> None:
        """Spread the weights over ranks, those of a reference or teacher that comes later too.

        A policy that was made empty reads this rank's part of its weights now.
        """
        self._sharding = sharding
        if self.merged is not None:
            self.merged.remove()
            self.merged = None
        _spread(self.policy, sharding)
        self.policy.lockstep = True

    def gather(self) -> None:
        """Make the weights whole on every rank, for sampling: the ranks then need not call the models together."""
        if self.sharded and not self._gathered:
            for module in self.modules():
                gather(module)
            self._gathered, self.policy.lockstep = True, False

    def scatter(self) -> None:
        """Spread gathered weights over the ranks again."""
        if self._gathered:
            for module in self.modules():
                scatter(module)
            self._gathered, self.policy.lockstep = False, True

    def modules(self) -> list[nn.Module]:
        """Return all trained modules: the policy's own, and those of a reference and a teacher."""
        further = (module for modules in self.frozen.values() for module in modules.values())
        return [*self.policy.trained.values(), *further]

    def measure(self, meter: Meter) -> None:
        """Count the computation of all trained modules from now on, and of a later reference or teacher."""
        self.policy.meter = meter
        for modules in (self.policy.trained, *self.frozen.values()):
            self._measure(modules)

    def _measure(self, modules: Mapping[str, nn.Module]) -> None:
        if self.policy.meter is not None:
            self.policy.meter.watch(modules)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (denoiser.parameter, parameter) for everything trained, in a fixed order."""
        for name, module in self.policy.trained.items():
            for key, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{key}", parameter

    def parameters(self) -> list[nn.Parameter]:
        """Return everything trained."""
        return [parameter for _, parameter in self.named_parameters()]

    def changed(self) -> None:
        """Note that the parameters changed: a fused optimizer does not bump their versions."""
        if self.merged is not None:
            self.merged.forget()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the trained parameters, whole, by name."""
        return {name: parameter.shape for name, parameter in self.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters, float32 on CPU; of spread ones all ranks must ask together."""
        return {name: whole(p.detach()).to("cpu", torch.float32, copy=True) for name, p in self.named_parameters()}

    def read(self, files: Sequence[Path] | None) -> None:
        """Set the trained parameters to stored ones, see ``fill``."""
        self.fill(dict(self.named_parameters()), files)

    def fill(self, targets: Mapping[str, Tensor], files: Sequence[Path] | None) -> None:
        """Fill tensors like the trained parameters with stored ones; of spread ones each rank reads its part.

        Args:
            targets: by parameter name.
            files: a file of whole parameters, or the parts several ranks wrote; None: the base model's own weights.

        Raises:
            CorruptError: names or shapes differ from the trained ones.
        """
        if files is None:
            for name, stored in self.policy.stored.items():
                own = [key for key in targets if key.startswith(f"{name}.")]
                stored.read({key.removeprefix(f"{name}."): targets[key] for key in own})
            return
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
        """True when the reference is a frozen copy that must be given; LoRA is its own reference when switched off."""
        return self.lora is None and self._reference is None

    def set_reference(self, base: Policy) -> None:
        """Give the frozen base model that full weights are compared with; equal weights give equal velocities."""
        self._reference = self._beside(base, _computed_as_trained)
        self._measure(self._reference)

    @property
    def teachers(self) -> tuple[str, ...]:
        """The names of the teachers that were given; that of an only one is empty."""
        return tuple(self._teachers)

    @property
    def frozen(self) -> dict[str, Mapping[str, nn.Module]]:
        """Further modules by role."""
        teachers = {f"teacher {name}".strip(): modules for name, modules in self._teachers.items()}
        return {"reference": self._reference or {}, **teachers}

    def set_teacher(self, teacher: Policy, name: str = "") -> None:
        """Give a frozen teacher, a model of the same family; equal weights give equal velocities."""
        self._teachers[name] = self._beside(teacher, _computed_as_trained if self.lora is None else _frozen)
        self._measure(self._teachers[name])

    def _beside(self, other: Policy, prepare: Callable[[nn.Module], nn.Module]) -> dict[str, nn.Module]:
        modules = {name: prepare(module) for name, module in other.trained.items()}
        if self._sharding is not None:
            _spread(other, self._sharding)
            if self._gathered:
                for module in modules.values():
                    gather(module)
        return modules

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Let the trained parameters have other values inside, in the order of ``parameters``; no copy is made.

        Contents of sharded parameters are exchanged in place: gathering refers to their memory.
        """
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
    def without_adapters(self) -> Iterator[None]:
        """Switch adapters off, inside."""
        for module in self.policy.trained.values():
            module.disable_adapters()
        try:
            yield
        finally:
            for module in self.policy.trained.values():
                module.enable_adapters()


def _spread(policy: Policy, sharding: Sharding) -> None:
    """Spread a policy's denoisers over the ranks, and read this rank's part of weights that were not read yet."""
    sharding.shard(policy.trained.values(), policy.blocks)
    if policy.settings.empty:
        for name, module in policy.trained.items():
            policy.stored[name].give(module, sharding.device)


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


def _computed_as_trained(module: nn.Module) -> nn.Module:
    """Return a frozen module, in place, whose forward is bit for bit that of trained float32 copies of its weights.

    Under autocast, linear and convolution layers round their weights to the forward's dtype whatever they are stored
    in. All others (norms, embeddings, tables) compute in the dtype of their weights, which must then be float32 here
    too: a bfloat16 norm weight alone makes the KL to the base model 1e-5 before anything was trained.
    """
    for layer in module.modules():
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return _frozen(module)
