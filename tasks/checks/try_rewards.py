"""Tries every reward on artificial samples before sampling, so that its errors show in the first minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowmill.configs.errors import RewardError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import make_chain_engine, make_engine
from flowmill.models.rewards.base import Batch, Needs, Origin, Reward
from flowmill.models.rewards.factory import RewardCache, check_section, needs_of, works_on_accelerator
from flowmill.models.rewards.invocation import Handling, declared_needs, score
from flowmill.models.rewards.remote import RemoteReward
from flowmill.tasks.checks.check_rewards import asked_of, check_needs
from flowmill.tasks.execution.runners import score_workers
from flowmill.tasks.inputs.fits import Fits
from flowmill.tasks.inputs.prompt_rows import read_picture
from flowmill.tasks.inputs.prompts import Prompt, stored_metadata
from flowmill.tasks.inputs.renderer import reads_images
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.specs.plan import RunPlan

#: Number of prompts, and of samples per prompt, in the trial of a reward.
_TRIED = 2


def try_rewards(
    plan: RunPlan,
    *,
    load: bool = True,
    rewards: RewardCache | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RewardCache:
    """Build every reward and judge, score artificial samples of the first two prompts with each, and return them.

    With a single sample, a reward that returns one score for the whole batch would pass. A reward that compares the
    samples of a group gets two samples per prompt. The scores themselves are ignored.

    Rewards that run on the ranks' accelerators are not built; only their options are checked. A failed connection is
    retried as for a shard.

    Args:
        plan: of the config.
        load: also try rewards that load or download a model; otherwise only their options are checked.
        rewards: creates the rewards, and caches them; a new cache when absent.
        sleep: waits some seconds before a retry.
    """
    execution = plan.config.execution
    rewards = RewardCache(Fits(plan.config.store).located) if rewards is None else rewards
    for section, prompts in _tried(plan):
        # The launching process must not use the devices of the ranks.
        if (execution.ranks > 1 and works_on_accelerator(section)) or (not load and loads_model(section)):
            check_section(section)
            continue
        _try(rewards.of(section), section, prompts, plan, sleep)
    return rewards


def reach_engines(config: RunConfig) -> None:
    """Wait until the servers that draw for rollouts answer; raise EngineError if one does not."""
    tokens = config.rollout.tokens
    for engine in (make_chain_engine(config.rollout.engine), None if tokens is None else make_engine(tokens.engine)):
        if engine is not None and hasattr(engine, "reach"):
            engine.reach()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTime:
    """Estimated scoring time of a reward."""

    reward: str
    seconds: float
    """Seconds per artificial sample in one process."""
    samples: int
    """Samples that it scores per epoch."""
    workers: int
    """Samples scored in parallel, on a machine with as many cores as this one."""


def time_rewards(plan: RunPlan, rewards: RewardCache, cost: Cost) -> list[ScoringTime]:
    """Return the scoring time per epoch of rewards that use no accelerator, measured with another trial.

    Args:
        plan: of a config whose rewards were tried.
        cost: cost of the run.
    """
    execution, sections = plan.config.execution, {section.slot: section for section in plan.config.scored}
    several = execution.nodes > 1
    workers = score_workers(execution, on_rank=several) * (execution.ranks if several else 1)
    times = []
    for slot, prompts in ((section.slot, prompts) for section, prompts in _tried(plan) if section.slot in sections):
        section = sections[slot]
        if (
            section.server is None
            and not loads_model(section)
            and declared_needs(rewards.of(section)).media != "latents"
        ):
            batch = _trial_of(rewards.of(section), section, prompts, plan)
            began = time.perf_counter()
            score(rewards.of(section), slot, batch, Handling.of(section))
            took = (time.perf_counter() - began) / len(batch)
            times.append(ScoringTime(reward=slot, seconds=took, samples=cost.samples_per_epoch, workers=workers))
    return times


def _tried(plan: RunPlan) -> list[tuple[RewardSection, Sequence[Prompt]]]:
    config, prompts = plan.config, plan.prompts
    heldout = prompts["heldout"] or prompts["train"]
    listed = [(s, prompts["train"]) for s in config.scored] + [(s, heldout) for s in config.evaluate.judges]
    return [(s, (asked_of(s, own) or asked_of(s, prompts["train"]))[:_TRIED]) for s, own in listed]


def loads_model(section: RewardSection) -> bool:
    """Return whether a reward loads a model that is large enough for an accelerator."""
    return section.server is None and needs_of(section.name, section.options).accelerated


def _trial_of(reward: Reward, section: RewardSection, prompts: Sequence[Prompt], plan: RunPlan) -> Batch:
    """Return one artificial sample per prompt, or several for a groupwise reward or a single prompt."""
    needs = declared_needs(reward)
    each = _TRIED if needs.groupwise or len(prompts) == 1 else 1
    return _trial([prompt for prompt in prompts for _ in range(each)], section, plan, needs)


def _trial(prompts: Sequence[Prompt], section: RewardSection, plan: RunPlan, needs: Needs) -> Batch:
    """Return an artificial sample of each prompt, with its start images if the reward needs them."""
    seen, started = plan.drawer if reads_images(plan.config, section) else plan, needs.references
    media = _noise(needs) if needs.media == "sounds" else seen.modality.trial(seen.config)
    shard = "none yet: rewards are tried before sampling"
    return Batch(
        media=np.concatenate([media] * len(prompts)),
        prompts=[prompt.text for prompt in prompts],
        metadata=[stored_metadata(prompt.metadata) for prompt in prompts],
        groups=[prompt.id for prompt in prompts],
        references=[[read_picture(path) for path in prompt.images] for prompt in prompts] if started else (),
        origin=Origin(samples=("made up for the trial",) * len(prompts), shard=shard),
    )


def _noise(needs: Needs) -> np.ndarray:
    """Return a second of noise, (1, N, 2) float32."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, (1, needs.rate or 16_000, 2)).astype(np.float32)


def _try(
    reward: Reward, section: RewardSection, prompts: Sequence[Prompt], plan: RunPlan, sleep: Callable[[float], None]
) -> None:
    if isinstance(reward, RemoteReward):
        reward.introduce()
        _check_served(section, declared_needs(reward), plan)
    needs = declared_needs(reward)
    if needs.media == "latents":
        # Their shape depends on the model, which is not loaded yet.
        return
    execution = plan.config.execution
    delay = execution.retry_delay_s
    batch = _trial_of(reward, section, prompts, plan)
    for left in reversed(range(execution.retries + 1)):
        try:
            score(reward, section.slot, batch, replace(Handling.of(section), exclude=False))
            return
        except OSError as error:
            if not left or not isinstance(error, ConnectionError | TimeoutError):
                notes = " ".join(error.__notes__)
                raise RewardError(f"{type(error).__name__}: {error}. {notes} Nothing was sampled yet.") from error
        sleep(delay)
        delay *= 2


def _check_served(section: RewardSection, needs: Needs, plan: RunPlan) -> None:
    """Check that a run meets the needs of a server's reward, which only the server knows."""
    # Servers say 'images' for 'samples', which may be texts.
    check_needs(section, replace(needs, media="samples") if needs.media == "images" else needs, plan)
