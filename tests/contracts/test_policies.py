"""What every model family must do; parametrized over the table, on tiny real pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from configs.errors import ConfigError
from configs.registry import resolve
from models.adapters import LoraSpec, Trainable, check_lora_targets
from models.policies import POLICIES
from models.policies.base import Conditioning, Part, Policy, PolicySettings
from models.sampling import Sampler, grid_at, ode_plan, replay, sample
from models.schedules import AllSteps
from models.solvers import Euler
from models.transitions import ODE, FlowSDE

ALL = frozenset(Part)
#: family -> how its tiny pipeline is called.
TINY: Mapping[str, dict[str, Any]] = {"sd3": {"height": 16, "width": 32, "max_sequence_length": 1}}
PROMPTS = ['"12"', '"34"', '"56"', '"78"']


def test_every_family_has_a_tiny_pipeline() -> None:
    assert set(TINY) == set(POLICIES)


@pytest.fixture(params=sorted(POLICIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Load = Callable[..., Policy]


@pytest.fixture
def load(family: str, tiny_base: Path) -> Load:
    def make(guidance_scale: float = 1.0, parts: frozenset[Part] = ALL, **options: Any) -> Policy:
        tiny = TINY[family]
        settings = PolicySettings(height=tiny["height"], width=tiny["width"], guidance_scale=guidance_scale)
        options = {"max_sequence_length": tiny["max_sequence_length"], **options}
        cls = resolve(POLICIES, family, what="policy")
        return cls.load(tiny_base, settings, parts, options)

    return make


def conditioning(policy: Policy, guided: bool, prompts: list[str] = PROMPTS) -> Conditioning:
    negative = policy.encode([""] * len(prompts)) if guided else None
    return Conditioning(policy.encode(prompts), negative)


def noise(policy: Policy, rows: int = 4) -> torch.Tensor:
    return policy.initial_latents([torch.Generator().manual_seed(row) for row in range(rows)])


def no_noise(step: int) -> torch.Tensor:
    raise AssertionError("the ODE needs no noise")


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("schedule", ["scheduler", "linear"])
def test_ode_equals_the_pipeline_bit_for_bit(
    family: str, load: Load, tiny_base: Path, guidance_scale: float, schedule: str
) -> None:
    policy = load(guidance_scale, schedule=schedule)
    steps = 5
    rollout = sample(
        policy,
        conditioning(policy, guidance_scale > 1),
        noise(policy),
        policy.sigmas(steps),
        sampler=Sampler(kernel=ODE(), solver=Euler()),
        plans=[ode_plan()] * 4,
        noise=no_noise,
    )
    # The tiny SD3 has no T5, which diffusers wants to be told.
    pipeline = DiffusionPipeline.from_pretrained(tiny_base, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    chosen = {"sigmas": list(np.linspace(1, 1 / steps, steps))} if schedule == "linear" else {}
    arguments = {"guidance_scale": guidance_scale, "num_inference_steps": steps, **TINY[family], **chosen}
    latents = pipeline(PROMPTS, latents=noise(policy), output_type="latent", **arguments).images
    images = pipeline(PROMPTS, latents=noise(policy), output_type="np", **arguments).images
    assert torch.equal(rollout.final, latents)
    np.testing.assert_array_equal(policy.decode(rollout.final).numpy(), (images * 255).round().astype(np.uint8))


def rollout_of(policy: Policy, prompts: list[str] = PROMPTS, dtype: torch.dtype = torch.float32) -> Any:
    draws = {step: torch.randn(len(prompts), *noise(policy).shape[1:]) for step in range(4)}
    return sample(
        policy,
        conditioning(policy, policy.settings.guidance_scale > 1, prompts),
        noise(policy, len(prompts)),
        policy.sigmas(4),
        sampler=Sampler(kernel=FlowSDE(), solver=Euler(), storage_dtype=dtype),
        plans=[AllSteps().draw(4, 0, 1)] * len(prompts),
        noise=draws.__getitem__,
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_replay_equals_the_rollout_exactly(load: Load, guidance_scale: float, dtype: torch.dtype) -> None:
    policy = load(guidance_scale)
    rollout = rollout_of(policy, dtype=dtype)
    assert rollout.states.dtype == dtype
    cond, sigmas = conditioning(policy, guidance_scale > 1), policy.sigmas(4)
    for step in range(3):
        grid = grid_at(sigmas, torch.full((4,), step))
        before, after = rollout.states[:, step].float(), rollout.states[:, step + 1].float()
        velocity = policy.velocity(before, grid.sigma, cond)
        _, log_probs = replay(FlowSDE(), before, velocity, after, grid)
        assert torch.equal(log_probs.detach(), rollout.log_probs[:, step])


def test_the_gradient_of_guidance_is_that_of_the_half_asked_for(family: str, tiny_base: Path) -> None:
    def gradients(train_negative: bool, detach: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        settings = PolicySettings(height=16, width=32, guidance_scale=4.5, train_negative=train_negative)
        policy = resolve(POLICIES, family, what="policy").load(tiny_base, settings, ALL, {"max_sequence_length": 1})
        trainable = Trainable(policy, None, seed=0)
        cond, latents, sigma = conditioning(policy, True), noise(policy), torch.full((4,), 0.5)
        velocity = policy.velocity(latents, sigma, cond)
        if detach:
            assert cond.negative is not None
            negative, positive = (
                policy.velocity(latents, sigma, Conditioning(c)) for c in (cond.negative, cond.positive)
            )
            velocity = negative.detach() + 4.5 * (positive - negative.detach())
        velocity.pow(2).mean().backward()
        return velocity.detach(), [p.grad for p in trainable.parameters() if p.grad is not None]

    conditional, detached, both = gradients(False, False), gradients(True, True), gradients(True, False)
    assert torch.equal(conditional[0], both[0])
    for ours, theirs in zip(conditional[1], detached[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(conditional[1], both[1], strict=True))


def test_rows_with_mixed_steps_equal_their_own(load: Load) -> None:
    policy = load(4.5)
    rollout = rollout_of(policy)
    cond, sigmas = conditioning(policy, True), policy.sigmas(4)
    steps = torch.tensor([0, 1, 2, 0])
    rows = torch.arange(4)
    grid = grid_at(sigmas, steps)
    velocity = policy.velocity(rollout.states[rows, steps], grid.sigma, cond)
    _, mixed = replay(FlowSDE(), rollout.states[rows, steps], velocity, rollout.states[rows, steps + 1], grid)
    torch.testing.assert_close(mixed.detach(), rollout.log_probs[rows, steps], rtol=0, atol=1e-6)


def test_encoding_a_prompt_does_not_depend_on_its_neighbors(load: Load) -> None:
    policy = load()
    together = policy.encode(PROMPTS)
    others = policy.encode([PROMPTS[0], '"00"', '"99"', '"01"'])
    for name in together:
        assert torch.equal(together[name][0], others[name][0])


def test_text_encoders_and_vae_are_loaded_only_when_asked(load: Load) -> None:
    texts = load(parts=frozenset({Part.TEXT}))
    assert texts.encode(['"12"'])["pooled"].shape[0] == 1
    assert texts.pipeline.vae is None
    rest = load(parts=frozenset({Part.DENOISER, Part.VAE}))
    assert rest.pipeline.text_encoder is None


def test_published_lora_targets_match(load: Load) -> None:
    policy = load()
    for name, module in policy.denoisers.items():
        check_lora_targets(name, module, policy.lora_targets)
        with pytest.raises(ConfigError, match=r"'attn\.to_nowhere' matches no layer"):
            check_lora_targets(name, module, ["attn.to_nowhere"])


def test_fresh_lora_changes_nothing_and_can_be_switched_off(load: Load) -> None:
    policy = load(4.5)
    cond, latents = conditioning(policy, True), noise(policy)
    sigma = torch.full((4,), 0.5)
    base = policy.velocity(latents, sigma, cond)
    trainable = Trainable(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=1)
    assert torch.equal(policy.velocity(latents, sigma, cond).detach(), base)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(0.1)
    assert not torch.equal(policy.velocity(latents, sigma, cond).detach(), base)
    assert torch.equal(trainable.reference_velocity(latents, sigma, cond), base)


@pytest.mark.parametrize("lora", [True, False])
def test_a_training_step_lowers_the_loss_and_reaches_every_parameter(load: Load, lora: bool) -> None:
    policy = load()
    spec = LoraSpec(rank=2, alpha=4, targets=policy.lora_targets) if lora else None
    trainable = Trainable(policy, spec, seed=0)
    cond, latents, sigma = conditioning(policy, False), noise(policy), torch.full((4,), 0.5)
    optimizer = torch.optim.Adam(trainable.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = (policy.velocity(latents, sigma, cond) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    without = [name for name, parameter in trainable.named_parameters() if parameter.grad is None]
    # The last block's text stream ends unused in every MMDiT.
    assert all("transformer_blocks.3" in name for name in without), without


def test_equal_seeds_give_equal_lora_weights_whatever_the_global_generator(load: Load) -> None:
    states = []
    for _ in range(2):
        torch.rand(7)
        policy = load()
        before = torch.get_rng_state()
        states.append(Trainable(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=3).state())
        assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_gradient_checkpointing_gives_equal_gradients(family: str, tiny_base: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        settings = PolicySettings(height=16, width=32, gradient_checkpointing=checkpointing)
        cls = resolve(POLICIES, family, what="policy")
        policy = cls.load(tiny_base, settings, ALL, {"max_sequence_length": 1})
        trainable = Trainable(policy, None, seed=0)
        for module in policy.denoisers.values():
            module.train()
        policy.velocity(noise(policy), torch.full((4,), 0.5), conditioning(policy, False)).pow(2).mean().backward()
        gradients.append([p.grad for p in trainable.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("height", "nearest"), [(20, "The nearest are 16 and 24"), (3, "The nearest are 8 and 16")])
def test_sizes_the_model_cannot_take(family: str, tiny_base: Path, height: int, nearest: str) -> None:
    cls = resolve(POLICIES, family, what="policy")
    with pytest.raises(ConfigError, match=nearest):
        cls.load(tiny_base, PolicySettings(height=height, width=32), ALL, {})


def test_another_pipeline_is_refused(family: str, tmp_path: Path) -> None:
    cls = resolve(POLICIES, family, what="policy")
    (tmp_path / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ConfigError, match="holds a OtherPipeline"):
        cls.load(tmp_path, PolicySettings(height=16, width=32), ALL, {})
    with pytest.raises(ConfigError, match=r"no model_index\.json"):
        cls.load(tmp_path / "none", PolicySettings(height=16, width=32), ALL, {})
