"""What memory layers of published models take on the device, beside what ``flowmill check`` says of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from flowmill.configs.load import load_config
from flowmill.configs.model_families import most_images
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import architecture_of, meta_decoder
from flowmill.models.memory.denoisers import DenoiserMemory, measured_denoiser, sample, train
from flowmill.models.memory.published import pipelines
from flowmill.models.memory.tracing import Blocks, forget_gradient
from flowmill.models.policies import POLICIES
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.device_placement import Placed
from flowmill.tasks.inputs.components import lora_spec
from flowmill.tasks.inputs.prompts import uses_guidance
from tools.accelerator import NAME
from tools.gpu.lines import Line, Lines, between, equal

ROOT = Path(__file__).parents[2]
SHORT = ("sd35_medium",)
PRESETS = ("sd35_medium", "sd15_ddpo", "flux1_dev", "flux2_klein", "qwen_image", "wan21_1_3b", "z_image_turbo")
#: Pixels a side where a device is as slow as a CPU.
SMALL = 128


def measure(device: torch.device, lines: Lines, *, short: bool) -> None:
    """Add a line for two and for three real blocks of some models, and for SD3.5 medium as a whole on a real device.

    A simulated one, which is slow, measures small images and clips, but of every family, and sampling and decoding too.
    """
    simulated = device.type == NAME
    for preset in SHORT if short else every_family() if simulated else PRESETS:
        blocks: list[int | None] = [2, 3] if short or not simulated else [2]
        if preset == "sd35_medium" and not simulated:
            blocks.append(None)
        with lines.told(f"memory of {preset}"):
            lines += _of_preset(preset, config_of(preset, short=short or simulated), device, blocks)
        gc.collect()
    with lines.told("models of rewards leave the device"):
        lines += _of_reward(device)


def every_family() -> list[str]:
    """Return a preset of each family, with images to start from and without: of those above, or the first by name."""
    found: dict[tuple[str, int | None], str] = {}
    for preset in (*PRESETS, *sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))):
        model = load_config(ROOT / "configs" / f"{preset}.yaml").model
        if model.path in pipelines():
            found.setdefault((model.policy, most_images(model.policy, model.options)), preset)
    return list(found.values())


def config_of(preset: str, *, short: bool) -> RunConfig:
    """Return a preset, made small where the device is slow: its clips are the shortest that are none of one frame."""
    path = ROOT / "configs" / f"{preset}.yaml"
    if not short:
        return load_config(path)
    family = resolve(POLICIES, load_config(path).model.policy, label="policy")
    clips = issubclass(family, ClipPolicy)
    frames = next(length for length in count(2) if length in family.lengths) if clips else 1
    return load_config(path, [f"model.height={SMALL}", f"model.width={SMALL}", f"model.frames={frames}"])


def traces_of(config: RunConfig) -> DenoiserMemory:
    """Return what traces a preset's model."""
    architecture = architecture_of(str(config.model.path))
    assert architecture is not None
    spec = lora_spec(config, resolve(POLICIES, config.model.policy, label="policy"))
    return measured_denoiser(config, architecture, spec, guided=uses_guidance(config))


def some_blocks(traced: DenoiserMemory, most: int | None) -> Blocks:
    """Return so many blocks of each kind, all where there is no limit."""
    return frozenset((name, place) for name, places in traced.tracer.groups for place in places[:most])


def _of_preset(preset: str, config: RunConfig, device: torch.device, blocks: Sequence[int | None]) -> Iterator[Line]:
    simulated, traced = device.type == NAME, traces_of(config)
    kept = [some_blocks(traced, most) for most in blocks]
    # What is on a device is traced no more.
    trained = [traced.tracer.of(some, train, 1, gradient=True).peak for some in kept]
    sampled = traced.tracer.of(kept[0], sample, 1).peak if simulated else 0
    decoding = traced.decoding() if simulated else 0
    # What a clip's autoencoder keeps to go back is a matter of gigabytes and minutes.
    following = traced.following() if simulated and config.model.frames == 1 else 0
    for place, most in enumerate(blocks):
        row, name = Row(traced, kept[place], device), f"{preset}, {'all' if most is None else most} blocks of a kind"
        if sampled and not place:
            yield _beside(f"{name}: MB of a sampling row", sampled, taken(device, row.sample)[0])
        took, reserved = taken(device, row.train)
        yield _beside(f"{name}: MB of a row's forward and backward", trained[place], took)
        yield Line(label=f"{name}: MB reserved for them", predicted=took / 1e6, measured=reserved / 1e6)
    if simulated:
        decoder = Decoder(traced, device)
        yield _beside(f"{preset}: MB of decoding a row", decoding, taken(device, decoder.decode)[0])
        if following:
            yield _beside(f"{preset}: MB of decoding a row and going back", following, taken(device, decoder.follow)[0])


def _beside(label: str, predicted: int, took: int) -> Line:
    return between(label, predicted / 1e6, took / 1e6)


def taken(device: torch.device, work: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that some work took at most on a device, and those it reserved for them."""
    torch.accelerator.memory.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    held, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
    work()
    most = torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    return most[0] - held, most[1] - reserved


class Row:
    """One row of a traced model, with random weights and adapters, on a device; the model is traced no more."""

    def __init__(self, traced: DenoiserMemory, kept: Blocks, device: torch.device) -> None:
        """Make the model with some of its blocks."""
        self.policy, self._traced, self._device = traced.policy, traced, device
        self.policy.forget_tables()
        self.policy.settings = replace(self.policy.settings, device=device)
        for name in self.policy.denoisers:
            setattr(self.policy.pipeline, name, filled(traced.shortened(kept), device))
        for module in self.policy.denoisers.values():
            self.policy.prepare(module)
        self._trainable = Trainable(self.policy, traced.adapters(), seed=0)
        for parameter in self._trainable.parameters():
            parameter.data = parameter.data.to(device)
            parameter.register_post_accumulate_grad_hook(forget_gradient)

    def sample(self) -> None:
        """Carry out a forward without gradient."""
        with torch.no_grad():
            self.policy.velocity(*self._traced.inputs(1, self._device))

    def train(self) -> None:
        """Carry out a forward and backward; gradients go through blocks without adapters too."""
        latents, sigma, conditioning = self._traced.inputs(1, self._device)
        self.policy.velocity(latents.requires_grad_(), sigma, conditioning).square().mean().backward()  # type: ignore[no-untyped-call]


class Decoder:
    """The autoencoder of a traced model, with small weights, and the latents of one row, on a device."""

    def __init__(self, traced: DenoiserMemory, device: torch.device) -> None:
        """Make the autoencoder."""
        self._policy = traced.policy
        self._policy.settings = replace(self._policy.settings, device=device)
        self._policy.pipeline.vae = filled(meta_decoder(traced.architecture).requires_grad_(False).eval(), device)
        self._latents = traced.inputs(1, device)[0]

    def decode(self) -> None:
        """Decode the row."""
        self._policy.decode(self._latents)

    def follow(self) -> None:
        """Decode the row and go back to its latents."""
        self._policy.decode_smoothly(self._latents.clone().requires_grad_()).square().mean().backward()  # type: ignore[no-untyped-call]


def filled(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module without weights with small ones, on a device: random, where they decide how fast it computes."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    made = _given(tensor, device)
                    held[name] = nn.Parameter(made, tensor.requires_grad) if held is part._parameters else made  # type: ignore[assignment]
        for name, value in vars(part).items():
            # Tables of positions that are no buffers: the module moves them to the device by itself.
            if isinstance(value, Tensor) and value.is_meta:
                setattr(part, name, _given(value, torch.device("cpu")))
            elif isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
                setattr(part, name, [_given(each, torch.device("cpu")) for each in value])
    return module


def _given(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with content if it had none."""
    if not tensor.is_meta:
        return tensor.detach().to(device)
    made = torch.empty_like(tensor, device=device)
    return made.fill_(0.02) if device.type in (NAME, "cpu") or not made.is_floating_point() else made.normal_(std=0.02)


def _of_reward(device: torch.device) -> Iterator[Line]:
    before = torch.accelerator.memory_allocated(device)
    reward = _Scorer(device)
    held = torch.accelerator.memory_allocated(device) - before
    placed = Placed(reward)
    with placed.at_work():
        pass
    placed.rest()
    after = torch.accelerator.memory_allocated(device) - before
    yield between("MB of a reward's model at work", 64 * 1.048576, held / 1e6)
    yield equal("MB of it when its stage is over", 0.0, after / 1e6)


class _Scorer:
    """A reward with a model of 64 MiB."""

    def __init__(self, device: torch.device) -> None:
        self._model = nn.Linear(4096, 4096, bias=False).to(device)

    def score(self, media: object, prompts: object, metadata: object) -> list[float]:
        """Never asked."""
        raise AssertionError("nothing is scored here")
