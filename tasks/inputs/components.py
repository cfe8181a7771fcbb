"""Builds the objects that a config names: sampler kernel and plan, algorithm, stores, formats, model call options."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flowmill.configs.algorithm_defaults import AlgorithmNeeds
from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import chosen, create, resolve
from flowmill.configs.schema import RunConfig
from flowmill.configs.tokens import TokensSection
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.policies.attention import attention_identity
from flowmill.models.weights.lora_files import adapter_files
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.algorithms import algorithms_of
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.prompts import uses_guidance

if TYPE_CHECKING:
    from flowmill.models.maths.schedules import Plan
    from flowmill.models.maths.solvers import Solver
    from flowmill.models.maths.transitions import Kernel
    from flowmill.models.policies.base import Policy
    from flowmill.models.weights.lora import LoraSpec
    from flowmill.models.weights.lora_start import StartAdapter
    from flowmill.storage.trajectories.base import TrajectoryStore
    from flowmill.storage.trajectories.media import MediaFormat
    from flowmill.tasks.algorithms.base import Algorithm


def tokens_of(config: RunConfig) -> TokensSection:
    """Return how texts are sampled."""
    return config.rollout.tokens or TokensSection()


def make_algorithm(config: RunConfig) -> Algorithm:
    """Return the training objective."""
    return chosen(algorithms_of(kind_name(config)), config.optimize.algorithm, label="optimize.algorithm")  # type: ignore[no-any-return]


def algorithm_needs(config: RunConfig) -> AlgorithmNeeds:
    """Return the requirements of the algorithm that determine the stages and their inputs.

    A config read from a run's record already holds them, so the algorithm is not imported.
    """
    needs = config.known_needs
    if needs is not None:
        return needs
    requires = make_algorithm(config).requires
    ends = ":" in config.optimize.algorithm.name or requires.ends
    always = (requires.old_means, requires.gradients, requires.rewards)
    return AlgorithmNeeds(*always, ends, requires.desired, requires.guided)


def lora_spec(config: RunConfig, family: type[Policy]) -> LoraSpec | None:
    """Return the LoRA adapters to train: of ``model.lora.start``, or new on the targets of config or family."""
    from flowmill.models.weights.lora import LoraSpec

    lora = config.model.lora
    if lora is None:
        return None
    untrained = family.untrained_parts(config.model.options)
    if lora.start is not None:
        files = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in adapter_files(lora.start))
        said = (lora.said(name) for name in ("rank", "alpha", "targets"))
        return replace(_of_start(family, lora.start, files, *said), untrained=untrained)
    targets = tuple(lora.targets or family.lora_targets)
    return LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=targets, untrained=untrained)


@lru_cache(8)
def _of_start(
    family: type[Policy],
    start: str,
    files: tuple[tuple[str, int, int], ...],
    rank: int | None,
    alpha: int | None,
    targets: tuple[str, ...] | None,
) -> LoraSpec:
    """Return the spec of start adapters; ``files`` (name, mtime, size) are part of the cache key."""
    adapter: StartAdapter = family.read_adapter(start)
    return adapter.spec(rank=rank, alpha=alpha, targets=targets)


def make_kernel(config: RunConfig) -> Kernel:
    """Return the stochastic step of rollouts."""
    return chosen(KERNELS, config.rollout.sampler, label="rollout.sampler")  # type: ignore[no-any-return]


def make_plan(config: RunConfig) -> Plan:
    """Return the plan that draws which steps are stochastic and stored."""
    return chosen(PLANS, config.rollout.plan, label="rollout.plan")  # type: ignore[no-any-return]


def make_solver(name: str, where: str) -> Solver:
    """Return a deterministic solver; ``where`` is the setting that names it."""
    return create(SOLVERS, name, {}, label=where)  # type: ignore[no-any-return]


def guidance_options(config: RunConfig) -> dict[str, Any]:
    """Return the options of guidance wherever it enters: as an input of the model at any scale, as a second forward
    pass at scales above 1 (it is off otherwise)."""
    model = config.model
    if spec_of(model.policy).guidance == "input":
        return {"guidance_scale": model.guidance_scale}
    if uses_guidance(config):
        return {"guidance_scale": model.guidance_scale, "negative_prompt": model.negative_prompt}
    return {}


def call_options(config: RunConfig) -> dict[str, Any]:
    """Return the call options that change the samples of a policy, and no others.

    Attention counts where it is approximate. Compilation and devices only change rounding.
    """
    model, guided = config.model, guidance_options(config)
    size = {"height": model.height, "width": model.width, "dtype": model.dtype, "options": model.options}
    clip = {"frames": model.frames} if model.frames > 1 else {}
    tiles = {"vae_tiling": True} if model.vae_tiling else {}
    return {**size, **clip, **tiles, **guided, "attention": attention_identity(model.attention)}


def as_evaluated(config: RunConfig) -> RunConfig:
    """Return the config with the model sizes of evaluations, which may differ from those of rollouts."""
    sizes = {name: getattr(config.evaluate, name) for name in ("height", "width", "frames")}
    changed = {name: size for name, size in sizes.items() if size is not None}
    return config.model_copy(update={"model": config.model.model_copy(update=changed)}) if changed else config


def decode_rows(config: RunConfig) -> int:
    """Return the number of images or clips per decoding batch."""
    execution = config.execution
    return execution.decode_batch_size or execution.rollout_batch_size


def sampling_sizes(config: RunConfig) -> dict[str, int | None]:
    """Return the batch sizes that affect the bytes of samples."""
    return {"rollout_batch_size": config.execution.rollout_batch_size, "decode_batch_size": decode_rows(config)}


def media_format(config: RunConfig) -> MediaFormat:
    """Return the format in which a run stores images and clips."""
    from flowmill.storage.trajectories.media import MediaFormat

    media = config.rollout.media
    return MediaFormat(name=media.format, lossless=media.lossless, fps=media.fps)


def open_trajectory_store(name: str) -> TrajectoryStore:
    """Return a trajectory store by name."""
    return resolve(TRAJECTORY_STORES, name, label="rollout.store")()  # type: ignore[no-any-return]
