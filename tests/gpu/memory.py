"""What memory layers of published models take on the device, beside what ``flowmill check`` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.load import load_config
from configs.registry import resolve
from configs.schema import RunConfig
from models.maths.conditioning import Conditioning
from models.policies import POLICIES
from models.policies.trainable import Trainable
from models.rewards.placing import Placed
from models.sizes.architectures import architecture_of, meta_denoiser
from models.sizes.footprints import Footprints, Kept, forget_gradient, kinds
from tasks.inputs.components import lora_spec
from tasks.kinds.diffusion.activations import footprints_of as traced_of
from tests.gpu.lines import Line, Lines, between, equal
from tests.support.accelerator import NAME

ROOT = Path(__file__).parents[2]
SHORT = ("sd35_medium",)
PRESETS = ("sd35_medium", "sd15_ddpo", "flux1_dev", "flux2_klein", "qwen_image", "wan21_1_3b", "z_image_turbo")
#: Pixels a side where a device is as slow as a CPU.
SMALL = 128


def measure(device: torch.device, lines: Lines, *, short: bool) -> None:
    """Add a line for two and for three real blocks of every model, and for SD3.5 medium as a whole on a real device."""
    for preset in SHORT if short else PRESETS:
        with lines.told(f"memory of {preset}"):
            lines += _of_preset(preset, device, short=short)
    with lines.told("models of rewards leave the device"):
        lines += _of_reward(device)


def config_of(preset: str, *, short: bool) -> RunConfig:
    """Return a preset, made small where the device is slow."""
    return load_config(
        ROOT / "configs" / f"{preset}.yaml", [f"model.height={SMALL}", f"model.width={SMALL}"] if short else []
    )


def footprints_of(config: RunConfig) -> Footprints:
    """Return what traces a preset's model."""
    architecture = architecture_of(str(config.model.path))
    assert architecture is not None
    return traced_of(config, architecture, lora_spec(config, resolve(POLICIES, config.model.policy, what="policy")))


def some_blocks(traced: Footprints, most: int | None) -> Kept:
    """Return so many blocks of each kind, all where there is no limit."""
    found = kinds(meta_denoiser(traced._architecture), traced._policy.blocks)
    return frozenset((name, place) for name, places in found for place in places[:most])


def _of_preset(preset: str, device: torch.device, *, short: bool) -> Iterator[Line]:
    traced = footprints_of(config_of(preset, short=short))
    wanted: list[int | None] = [2, 3]
    if preset == "sd35_medium" and not short:
        wanted.append(None)
    for most in wanted:
        kept = some_blocks(traced, most)
        # The simulated device has no attention of its own, and holds scores as such.
        with sdpa_kernel(SDPBackend.MATH) if device.type == NAME else nullcontext():
            predicted = traced._train(kept)
        taken, reserved = trained_row(traced, kept, device)
        name = f"{preset}, {'all' if most is None else most} blocks of a kind"
        yield between(f"{name}: MB of a row's forward and backward", predicted / 1e6, taken / 1e6)
        yield Line(what=f"{name}: MB reserved for them", predicted=taken / 1e6, measured=reserved / 1e6)


def trained_row(traced: Footprints, kept: Kept, device: torch.device) -> tuple[int, int]:
    """Return the bytes that a forward and backward of one row took on a device, and those it reserved for them."""
    policy = traced._policy
    before = policy.settings
    policy.forget_tables()
    policy.settings = replace(before, device=device)
    try:
        for name in policy.denoisers:
            setattr(policy.pipeline, name, filled(traced._shortened(kept), device))
        for module in policy.denoisers.values():
            policy.prepare(module)
        trainable = Trainable(policy, traced._fitting(), seed=0)
        for parameter in trainable.parameters():
            parameter.data = parameter.data.to(device)
            parameter.register_post_accumulate_grad_hook(forget_gradient)
        torch.accelerator.memory.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        held, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
        latents, sigma, conditioning = inputs(traced, device)
        policy.velocity(latents.requires_grad_(), sigma, conditioning).square().mean().backward()
        taken = torch.accelerator.max_memory_allocated(device) - held
        return taken, torch.accelerator.max_memory_reserved(device) - reserved
    finally:
        policy.settings = before
        policy.forget_tables()
        for name in policy.denoisers:
            setattr(policy.pipeline, name, traced._shortened(kept))


def inputs(traced: Footprints, device: torch.device) -> tuple[Tensor, Tensor, Conditioning]:
    """Return latents, noise level and conditioning of one row on a device, as what traces makes them."""
    positive, negative = (
        {
            name: torch.randn(row.shape).to(device, row.dtype) if row.is_floating_point() else row.to(device)
            for name, row in traced._rows.conditioning.items()
        }
        for _ in range(2)
    )
    latents = torch.randn(traced._rows.latents.shape).to(device)
    return latents, torch.tensor([0.5]).to(device), Conditioning(positive, negative if traced._guided else None)


def filled(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module without weights with small random ones, on a device."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                made = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                if tensor.is_meta and made.is_floating_point():
                    made.normal_(std=0.02)
                held[name] = nn.Parameter(made, tensor.requires_grad) if held is part._parameters else made
    return module


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
