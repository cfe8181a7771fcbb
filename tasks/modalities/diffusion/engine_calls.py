"""Rollouts as engines see them: the shared properties of chains, the weights, and settings that no engine carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import spec_of
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import make_chain_engine
from flowmill.models.engines.chains import Call, ChainRequest, PolicyWeights, Sde
from flowmill.models.maths.kernels import CPS
from flowmill.models.maths.schedules import Steps
from flowmill.models.maths.transitions import ODE, FlowSDE, Kernel
from flowmill.models.policies.diffusion import DiffusionPolicy
from flowmill.models.policies.nan_checks import noise_levels
from flowmill.models.weights.merging import merged_state
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.components import make_kernel
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.runs.seeds import derive, generator

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.tasks.modalities.diffusion.setting_combination import Combination
    from flowmill.tasks.runtime.host import ModelHost


def check_engine(combination: Combination) -> None:
    """Check that an engine can draw the chains of a run."""
    config = combination.config
    rollout, engine = config.rollout, make_chain_engine(config.rollout.engine)
    if engine is None:
        return
    images = config.prompts.image is not None or spec_of(config.model.policy).starts_from != "text"
    cannot = {
        "with 'data' nothing is rolled out. Remove rollout.engine": config.data is not None,
        "prompts come with images, which no request carries. Set it to 'local'": images,
        f"{combination.plan} branches, and a request is for one chain. Set that to 'all'": combination.draws[0].branches
        > 0,
        "rollout.latents_dtype 'float16' rounds the latents between steps, which no request asks for. Set that to "
        "'float32'": rollout.latents_dtype != "float32",
        "execution.sampling 'spread' has all ranks make every forward together, and the check of a server is one of a "
        "rank alone. Set that to 'whole'": config.execution.sampling == "spread",
        "model.quantize changes the base model, and it has another. Remove model.quantize": config.model.quantize
        is not None,
    }
    lacking = engine.lacks(rollout, sde_of(config.rollout.sampler.name, combination.kernel))
    reason = next((reason for reason, holds in cannot.items() if holds), None) or lacking
    if reason is not None:
        raise ConfigError(f"rollout.engine is '{rollout.engine.name}', but {reason.rstrip('.')}.")


def sde_of(name: str, kernel: Kernel) -> Sde:
    """Return a kernel in the terms of SGLang's requests. ``name``: its name in the config."""
    if isinstance(kernel, FlowSDE):
        return Sde(kind="sde", noise_level=kernel.noise_level)
    if isinstance(kernel, CPS):
        return Sde(kind="cps", noise_level=kernel.noise_level, squared=kernel.log_prob == "squared")
    return Sde(kind="ode" if isinstance(kernel, ODE) else name)


def call_of(config: RunConfig, policy: DiffusionPolicy) -> Call:
    """Return the properties that all chains of a rollout share."""
    steps = config.rollout.steps
    called = policy.pipeline_call(steps, config.model.negative_prompt if uses_guidance(config) else None)
    size = {"width": config.model.width, "height": config.model.height}
    return Call(
        arguments={**size, **({} if called is None else called.arguments)},
        sde=sde_of(config.rollout.sampler.name, make_kernel(config)),
        batch_size=config.execution.rollout_batch_size,
        shape=tuple(policy.initial_latents([generator(0)]).shape[1:]),
        sigmas=noise_levels(policy, steps).cpu(),
    )


def proof_of(config: RunConfig, prompt: str) -> ChainRequest:
    """Return the chain that shows a server's weights: the first step from fixed noise, without noise of its own."""
    return ChainRequest(prompt=prompt, seed=derive(config.run.seed, "proof"), states=(0, 1))


def stored_states(plan: Steps, checked: int | None, steps: int) -> tuple[int, ...]:
    """Return the states of a chain that are stored, those of a checked step, and the final one."""
    neighbors = () if checked is None else (checked, checked + 1)
    return tuple(sorted({*plan.states, *neighbors, steps}))


def checked_step(plan: Steps, steps: int, solver: str) -> int | None:
    """Return a step without noise whose velocity can be checked; None if there is none.

    It is the last one; with a solver that remembers earlier steps, the first.
    """
    quiet = [step for step in range(steps) if step not in plan.stochastic]
    if solver != "euler":
        return 0 if 0 in quiet else None
    return quiet[-1] if quiet else None


def weights_of(host: ModelHost, ref: ArtifactRef, weights: Weights) -> PolicyWeights:
    """Return the weights of a policy for an engine."""

    def write(folder: Path) -> None:
        trainable = host.exportable(ref, weights)
        for name, module in trainable.policy.trained.items():
            (folder / name).mkdir(parents=True)
            _save(merged_state(module), folder / name / "diffusion_pytorch_model.safetensors")

    return PolicyWeights(name=host.context.store.require(ref).digest[:16], write=write)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def step_gap(latents: Tensor, own: Tensor, start: Tensor) -> Tensor:
    """Return the distance of (B, ...) latents from the policy's, relative to its step from ``start``, (B,).

    It is the relative distance of velocities, as a step without noise is proportional to the velocity.
    """
    distance, length = ((one - own).flatten(1).square().sum(1).sqrt() for one in (latents, start))
    return distance / length
