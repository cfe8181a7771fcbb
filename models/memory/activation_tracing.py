"""Memory of forward and backward passes, measured without allocating it: the real layers run on tensors without data.

Every operation runs on fake tensors (``torch._subclasses.FakeTensorMode``), while allocated and released storages are
counted. Denoisers are built with two blocks of a kind, and then with three: each further block of a kind keeps the same
memory, so that of the whole model is extrapolated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.memory.architectures import meta_decoder, meta_denoiser
from flowmill.models.memory.autocast_rules import CudaCasts
from flowmill.models.memory.conditioning_shapes import as_wide
from flowmill.models.memory.published import Architecture
from flowmill.models.policies.attention_masks import KnownLayouts, WholeMasks, with_content
from flowmill.models.policies.decoding import recompute_decoder
from flowmill.models.policies.diffusion import Images
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.lora import LoraSpec, targeted
from flowmill.models.weights.stored_weights import empty_model

#: Any prompt; the shapes of conditioning do not depend on it.
_PROMPT = "a photo"
#: Blocks of a kind in the first measurement; one more gives the memory each keeps.
_FEW = 2
_CPU = torch.device("cpu")
#: Tiles overlap by a quarter on either side.
_OVERLAP = (4 / 3) ** 2

#: Blocks by the name of their list and their place in it.
Blocks = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TracedRows:
    """Inputs of a denoiser of the requested size, one row of each."""

    latents: Tensor
    """(1, ...) noise."""
    conditioning: Mapping[str, Tensor]
    """(1, ...) of each input."""


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages from their allocation until their release.

    ``torch.distributed._tools.mem_tracker.MemTracker`` does too, but does not support frozen weights.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.now: int = 0
        """Bytes in use."""
        self.peak: int = 0
        """Peak bytes in use."""
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and record its outputs."""
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, inputs)
        return result

    def _note(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        # Storages of inputs are not new, such as that of a view of a weight.
        if id(storage) in inputs or storage in self._counted:
            return
        self._counted.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


@contextmanager
def traced(fakes: FakeTensorMode, *, layouts: bool = False) -> Iterator[PeakMemory]:
    """Count allocations inside the context, on fake tensors, with CUDA's autocast rules.

    Args:
        fakes: the mode of the fake tensors.
        layouts: tensors that depend on sizes alone keep their content.
    """
    with fakes, CudaCasts(), WholeMasks(), KnownLayouts() if layouts else nullcontext(), PeakMemory() as memory:
        yield memory


class Footprints:
    """Measures the model of one architecture with the code of its family."""

    def __init__(
        self,
        policy: PipelinePolicy,
        architecture: Architecture,
        lora: LoraSpec | None,
        *,
        guided: bool,
        images: Images | None = None,
    ) -> None:
        """Bind to a model.

        Args:
            policy: a small pipeline of the family, with the requested settings and options; its parts are replaced.
            architecture: the model.
            lora: adapters; None: all weights are trained.
            guided: guidance by two predictions is on.
            images: source images of one prompt, for families that take them.
        """
        self._policy, self._architecture, self._lora, self._guided = policy, architecture, lora, guided
        self._results: dict[tuple[Any, ...], tuple[int, ...]] = {}
        small: Any = next(iter(policy.denoisers.values()))
        large: Any = meta_denoiser(architecture)
        with torch.no_grad():
            rows = policy.encode([_PROMPT], images)
        wider = as_wide(rows, small.config, large.config, policy.settings.dtype)
        # Sizes are those of the large model.
        policy.scale_of(architecture.latents[1])
        for name in policy.denoisers:
            # The number of latent channels is in its config.
            setattr(policy.pipeline, name, large)
        self._rows = TracedRows(policy.initial_latents([torch.Generator().manual_seed(0)]), wider)

    def sampling(self, rows: int = 1) -> int:
        """Return the bytes of a forward of some rows without gradient, without weights."""
        return self._of_blocks(self._sample, rows)

    def training(self, rows: int = 1) -> int:
        """Return the bytes of a forward and backward of some rows, without weights and their gradients."""
        return self._of_blocks(self._train, rows)

    def keeping(self, rows: int = 1) -> int:
        """Return the bytes that a forward of some rows keeps for its backward, until that begins."""
        return self._of_blocks(self._train, rows, result=1)

    def decoding(self, rows: int = 1) -> int:
        """Return the bytes of decoding the final latents of some rows, without the autoencoder's weights."""
        return self._once(self._decode, rows)[0]

    def following(self, rows: int = 1) -> int:
        """Return the bytes of decoding the final latents of some rows and of the backward pass to them."""
        return self._once(self._follow, rows)[0]

    def _once(self, work: Callable[..., tuple[int, ...]], *args: Any) -> tuple[int, ...]:
        """Return the results of some work, which is traced once."""
        if (work.__name__, *args) not in self._results:
            self._results[work.__name__, *args] = work(*args)
        return self._results[work.__name__, *args]

    def _decode(self, rows: int) -> tuple[int]:
        vae, fakes = self._decoder()
        if self._policy.settings.vae_tiling:
            vae.enable_tiling()
        with traced(fakes) as memory, torch.no_grad():
            decoded = self._policy.run_decoder(vae, torch.empty(self._latents(vae, rows)))
            (decoded / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return (memory.peak,)

    def _follow(self, rows: int) -> tuple[int]:
        vae, fakes = self._decoder()
        if self._policy.settings.gradient_checkpointing:
            recompute_decoder(vae)
        with traced(fakes) as memory:
            latents = torch.empty(self._latents(vae, rows)).requires_grad_()
            decoded = self._policy.run_decoder(vae, latents)
            (decoded / 2 + 0.5).square().mean().backward()
        # All tiles keep their activations at once, so tiles need the memory of the whole image, times their overlap.
        return (int(memory.peak * (_OVERLAP if self._policy.settings.vae_tiling else 1)),)

    def _decoder(self) -> tuple[Any, FakeTensorMode]:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        vae: Any = meta_decoder(self._architecture)
        fake_module(vae.requires_grad_(False).eval(), fakes)
        return vae, fakes

    def _latents(self, vae: Any, rows: int) -> tuple[int, ...]:
        """Return the shape of the final latents of some rows."""
        settings, (channels, pixels, _) = self._policy.settings, self._architecture.latents
        clips = any(name in vae.config for name in ("z_dim", "temporal_compression_ratio", "clip_length"))
        frames = (self._architecture.latent_frames(settings.frames),) if clips else ()
        return (rows, channels, *frames, settings.height // pixels, settings.width // pixels)

    def stored(self) -> int:
        """Return the bytes of a training row: latents before and after a step, and conditioning."""
        halves = 2 if self._guided else 1
        conditioning = sum(row.numel() * row.element_size() for row in self._rows.conditioning.values())
        return 2 * self._rows.latents.numel() * self._rows.latents.element_size() + halves * conditioning

    def _of_blocks(self, work: Callable[..., tuple[int, ...]], rows: int, *, result: int = 0) -> int:
        """Return a result of some work of the whole model, from models with a few blocks of one kind."""
        groups = kinds(meta_denoiser(self._architecture), self._policy.blocks)
        try:
            return extrapolated(lambda chosen: self._once(work, chosen, rows)[result], groups)
        except DataDependentOutputException:
            # Models that choose a denoiser by each row's noise level are traced with one row.
            if rows == 1:
                raise
            return rows * self._of_blocks(work, 1, result=result)

    def _shortened(self, chosen: Blocks) -> nn.Module:
        """Return the denoiser with some of its blocks."""
        module = empty_model(lambda: meta_denoiser(self._architecture), self._policy.settings.dtype)
        module.requires_grad_(False)
        for name in self._policy.blocks:
            blocks = getattr(module, name, None)
            if isinstance(blocks, nn.ModuleList):
                some = (block for place, block in enumerate(blocks) if (name, place) in chosen)
                setattr(module, name, nn.ModuleList(some))
        return module

    def _sample(self, chosen: Blocks, rows: int = 1) -> tuple[int]:
        """Return the peak of a forward without gradient."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._take(chosen, fakes)
        with traced(fakes, layouts=self._policy.asks_layout) as memory, torch.no_grad():
            self._policy.velocity(*self._inputs(fakes, rows))
        return (memory.peak,)

    def _train(self, chosen: Blocks, rows: int = 1) -> tuple[int, int]:
        """Return the peak of a forward and backward, and the memory in use between the two."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        for parameter in self._take(chosen, fakes):
            parameter.register_post_accumulate_grad_hook(forget_gradient)
        with traced(fakes, layouts=self._policy.asks_layout) as memory:
            latents, sigma, conditioning = self._inputs(fakes, rows)
            # Gradients go through blocks without adapters too.
            velocity = self._policy.velocity(latents.requires_grad_(), sigma, conditioning)
            between = memory.now
            velocity.square().mean().backward()  # type: ignore[no-untyped-call]
        return memory.peak, between

    def _take(self, chosen: Blocks, fakes: FakeTensorMode) -> list[nn.Parameter]:
        """Set denoisers with some of the blocks in the policy, and return the trained parameters."""
        # Allocations of another measurement must not count here.
        self._policy.forget_tables()
        for name in self._policy.denoisers:
            setattr(self._policy.pipeline, name, self._shortened(chosen))
        for module in self._policy.denoisers.values():
            self._policy.prepare(module)
        lora, merged = self._fitting(), None
        if lora is None or lora.targets:
            with torch.device("meta"):
                # Drawing the initial weights of adapters costs nothing there.
                merged = Trainable(self._policy, lora, seed=0).merged
        for module in self._policy.denoisers.values():
            fake_module(module, fakes)
        if merged is not None:
            with fakes:
                # Sums of weights and adapters are weights.
                merged.refresh()
        return [p for module in self._policy.denoisers.values() for p in module.parameters() if p.requires_grad]

    def _fitting(self) -> LoraSpec | None:
        """Return the adapters with targets limited to layers in these blocks."""
        if self._lora is None:
            return None
        names = [name for module in self._policy.denoisers.values() for name, _ in module.named_modules()]
        return replace(self._lora, targets=tuple(t for t in self._lora.targets if any(targeted(n, [t]) for n in names)))

    def _inputs(self, fakes: FakeTensorMode, rows: int) -> tuple[Tensor, Tensor, Conditioning]:
        """Return latents, noise levels and conditioning of some rows, counted as they are created."""
        positive, negative = (
            {name: _fake(row, fakes, rows) for name, row in self._rows.conditioning.items()} for _ in range(2)
        )
        conditioning = Conditioning(positive, negative if self._guided else None)
        return _fake(self._rows.latents, fakes, rows), torch.tensor([0.5] * rows), conditioning


def kinds(module: nn.Module, blocks: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the indices of equal blocks (same class and shapes of parameters), with the name of their list."""
    groups: dict[tuple[str, Any], list[int]] = {}
    for name in blocks:
        modules = getattr(module, name, None)
        if isinstance(modules, nn.ModuleList):
            for place, block in enumerate(modules):
                shapes = tuple((key, tuple(p.shape)) for key, p in block.named_parameters())
                groups.setdefault((name, (type(block), shapes)), []).append(place)
    return [(name, places) for (name, _), places in groups.items()]


def extrapolated(measure: Callable[[Blocks], int], groups: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return a measure of a whole model, from those of two and of three of its blocks of each kind.

    The peak is in the last block of some kind: its own memory, and that retained by all blocks before it.
    """
    if all(len(places) <= _FEW for _, places in groups):
        return measure(frozenset((name, place) for name, places in groups for place in places))
    largest = before = 0
    for name, places in groups:
        few = measure(frozenset((name, place) for place in places[:_FEW]))
        more = measure(frozenset((name, place) for place in places[: _FEW + 1])) if len(places) > _FEW else few
        largest = max(largest, before + few + (more - few) * max(0, len(places) - _FEW))
        before += (more - few) * len(places)
    return largest


def fake_module(module: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """Replace the parameters and buffers of a meta module by fake CPU tensors, in place; tied ones stay tied."""
    copies: dict[int, Any] = {}
    originals = []
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in copies:
                    fake: Any = FakeTensor(fakes, tensor.detach().to("meta"), _CPU)
                    copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if slots is part._parameters else fake
                    # While it lives no other tensor has its id.
                    originals.append(tensor)
                if tensor is not None:
                    slots[name] = copies[id(tensor)]
    return module


def _fake(row: Tensor, fakes: FakeTensorMode, rows: int) -> Tensor:
    """Return fake copies of a (1, ...) row; integers, such as lengths, keep their content."""
    with fakes:
        if row.is_floating_point():
            return torch.empty((rows, *row.shape[1:]), dtype=row.dtype)
        copies = torch.tensor(row.tolist() * rows)
    if row.ndim == 1 and isinstance(copies, FakeTensor):
        # The mode itself keeps the content of single numbers only; models that compute row by row read each.
        with with_content():
            copies.constant = row.repeat(rows)
    return copies


def forget_gradient(parameter: Tensor) -> None:
    """Drop a gradient as soon as it is complete: training counts gradients separately."""
    parameter.grad = None
