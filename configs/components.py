"""Lists the components that a config names, and its rewards of all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowmill.configs.base import Component
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig


def components(config: RunConfig) -> Iterator[tuple[str, Component]]:
    """Yield the setting and the component of each; rewards, monitors and judges by index."""
    rollout, evaluate = config.rollout, config.evaluate
    yield "model.policy", Component(name=config.model.policy)
    if config.model.build is not None:
        yield "model.build", config.model.build
    yield "prompts.sampler", config.prompts.sampler
    yield "rollout.sampler", rollout.sampler
    yield "rollout.plan", rollout.plan
    yield "rollout.solver", Component(name=rollout.solver)
    yield "rollout.store", Component(name=rollout.store)
    yield "rollout.engine", rollout.engine
    if rollout.tokens is not None:
        yield "rollout.tokens.engine", rollout.tokens.engine
    if config.render is not None:
        yield "render.model.policy", Component(name=config.render.model.policy)
        if config.render.model.build is not None:
            yield "render.model.build", config.render.model.build
    yield "advantage.estimator", config.advantage.estimator
    yield "evaluate.solver", Component(name=evaluate.solver)
    yield "optimize.algorithm", config.optimize.algorithm
    yield "optimize.optimizer", Component(name=config.optimize.optimizer)
    yield "execution.launcher", config.execution.launcher
    yield "execution.runner", config.execution.runner
    lists: dict[str, Sequence[Component]] = {
        "rewards": config.rewards,
        "monitors": config.monitors,
        "evaluate.judges": evaluate.judges,
    }
    for setting, sections in lists.items():
        for number, section in enumerate(sections):
            yield f"{setting}.{number}", section


def reward_sections(config: RunConfig) -> tuple[RewardSection, ...]:
    """Return the rewards, monitors and judges of a config."""
    return (*config.scored, *config.evaluate.judges)
