"""Algorithms that ask rewards while training, through their own ``loss``: where they lead, how far back they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.models.maths.schedules import LateStates
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.algorithms.climbing import recovered
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, Question, StateBatch, Subjects
from flowmill.tasks.algorithms.direct_align import DirectAlign
from flowmill.tasks.algorithms.refl import ReFL
from tests.support.toy import BEHAVIOR, START, Toy, liking, models_of, noised, states, vector
from tests.tasks.algorithms import cases


def gradient(algorithm: ReFL | DirectAlign, rows: DiffusionBatch, theta: Tensor) -> Tensor:
    return cases.gradient(algorithm, rows, Toy(theta, theta), BEHAVIOR)


def led_to(rows: StateBatch, theta: Tensor) -> Tensor:
    """Return where the Euler steps of rows lead, the last of them to level 0."""
    latents, levels = rows.latents, rows.levels
    for place in range(levels.shape[1]):
        level, after = levels[:, place], levels[:, place + 1] if place + 1 < levels.shape[1] else 0 * levels[:, 0]
        latents = latents + (after - level).reshape(-1, 1, 1) * Toy.at(theta, latents, level)
    return latents


def reward(rows: StateBatch, theta: Tensor) -> Tensor:
    about = rows.subjects
    assert about is not None
    return liking(led_to(rows, theta), about, [Question(prompts=about.prompts, factor=rows.weights)])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_reward_of_where_a_state_leads_goes_up(steps: int) -> None:
    theta, rows = vector(START), states(steps)
    slope = gradient(ReFL(steps=steps), rows, theta)
    assert float(reward(rows, theta - 1e-3 * slope / slope.norm()).mean()) > float(reward(rows, theta).mean())
    # Without a margin the loss is minus the reward, so the slope is known without a line of ours.
    known = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-reward(rows, known).mean(), known)
    torch.testing.assert_close(slope, expected)


def test_a_margin_stops_what_has_reached_it() -> None:
    theta, rows = vector(START), states()
    rewards = reward(rows, theta)
    middle = float(rewards.sort().values[1:3].mean())
    found = ReFL(margin=middle, scale=0.5).loss(rows, models_of(Toy(theta, theta), rewards=liking))
    torch.testing.assert_close(found.loss.detach(), 0.5 * (middle - rewards).clamp(min=0))
    assert (found.loss > 0).tolist() == (rewards < middle).tolist()
    torch.testing.assert_close(found.metrics["predicted_reward"], rewards)
    assert not gradient(ReFL(margin=float(rewards.min()) - 1), rows, theta).any()


def test_a_drawn_part_of_the_steps_has_a_gradient() -> None:
    theta, steps = vector(START), 3
    for first in range(steps):
        rows = states(steps, rows=1, first=first)
        # The states before the last 1 + draw % steps forwards are what they are.
        behind = steps - (1 + first)
        short = replace(rows, latents=_walked(rows, theta, behind), levels=rows.levels[:, behind:])
        expected = gradient(ReFL(steps=steps - behind), short, theta)
        torch.testing.assert_close(gradient(ReFL(steps=steps, truncate=True), rows, theta), expected)
    assert not torch.allclose(expected, gradient(ReFL(steps=1), replace(rows, levels=rows.levels[:, 2:]), theta))


def _walked(rows: StateBatch, theta: Tensor, steps: int) -> Tensor:
    latents = rows.latents
    for place in range(steps):
        level, after = rows.levels[:, place], rows.levels[:, place + 1]
        latents = latents + (after - level).reshape(-1, 1, 1) * Toy.at(theta, latents, level)
    return latents


def test_rewards_are_asked_of_those_that_say_so() -> None:
    theta = vector(START)
    with pytest.raises(TypeError, match="does not declare it"):
        ReFL().loss(states(), models_of(Toy(theta, theta)))
    with pytest.raises(TypeError, match="needs a StateBatch"):
        ReFL().loss(noised([0.0], [0]), models_of(Toy(theta, theta), rewards=liking))
    with pytest.raises(ConfigError, match="no forward can be left out"):
        create(ALGORITHMS, "refl", {"truncate": True}, label="algorithm")


@pytest.mark.parametrize("words", [False, True])
def test_the_reward_of_what_is_recovered_goes_up(words: bool) -> None:
    theta, rows = vector(START), noised([0.0] * 4, [0, 1, 2, 3])
    # The longer prompt asks for larger latents, and is the positive one.
    more = {"positive": ("aaaa",), "negative": ("a",), "times": {"high": 0.8}} if words else {}
    algorithm = DirectAlign(step=0.15, **more)
    slope = gradient(algorithm, rows, theta)
    about = rows.subjects
    assert about is not None

    def reward(at: Tensor) -> Tensor:
        level = rows.grid.sigma
        velocity = Toy.at(at, rows.latents, level)
        found = torch.zeros(())
        for sign in (-1, 1) if words else (-1,):
            reached = level + sign * 0.15
            clean = recovered(rows.latents, velocity, rows.noise, level, reached)
            if not words:
                found = found + liking(clean, about, [Question(prompts=about.prompts, factor=rows.weights)])
                continue
            k = (0.1 + 0.15 * (level - 0.02) / 0.78) if sign < 0 else (0.3 - 0.29 * (level - 0.02) / 0.78)
            near, far = ("aaaa", "a") if sign < 0 else ("a", "aaaa")
            asked = [
                Question(prompts=[f"{near}. {each}" for each in about.prompts], factor=1 + k),
                Question(prompts=[f"{far}. {each}" for each in about.prompts], factor=-rows.weights),
            ]
            found = found + liking(clean, about, asked) / 2
        return found.mean()

    known = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-reward(known), known)
    torch.testing.assert_close(slope, expected)
    assert float(reward(theta - 1e-4 * slope / slope.norm())) > float(reward(theta))


def test_a_step_beyond_the_image_ends_in_it() -> None:
    theta, rows = vector(START), noised([0.0] * 4, [0, 1, 2, 3])
    seen: list[Tensor] = []

    def rewards(latents: Tensor, reported: Subjects, questions: Sequence[Question]) -> Tensor:
        seen.append(latents)
        return latents.flatten(1).sum(1)

    DirectAlign(step=1.0).loss(rows, models_of(Toy(theta, theta), rewards=rewards))
    velocity = Toy.at(theta, rows.latents, rows.grid.sigma)
    torch.testing.assert_close(seen[0].detach(), rows.latents - rows.grid.sigma.reshape(-1, 1, 1) * velocity)
    # With the sample's own velocity the image is recovered from any level, in one step of any size.
    exact = recovered(rows.latents, rows.target, rows.noise, rows.grid.sigma, rows.grid.sigma / 3)
    torch.testing.assert_close(exact, rows.clean)


def test_words_are_drawn_for_each_row() -> None:
    theta, rows = vector(START), noised([0.0] * 4, [0, 1, 2, 3])
    asked: list[tuple[str, ...]] = []

    def rewards(latents: Tensor, reported: Subjects, questions: Sequence[Question]) -> Tensor:
        asked.extend(tuple(each.prompts) for each in questions)
        return latents.flatten(1).sum(1)

    words = {"positive": ["Real", "Detail"], "negative": ["Oil", "Flat"], "times": {"high": 0.7}}
    algorithm = create(ALGORITHMS, "direct_align", words, label="algorithm")
    algorithm.loss(rows, models_of(Toy(theta, theta), rewards=rewards))
    assert asked[0] == ("Real. a", "Real. ab", "Detail. abc", "Detail. abcd")
    assert asked[1] == ("Oil. a", "Flat. ab", "Oil. abc", "Flat. abcd")
    assert asked[2:] == [asked[1], asked[0]]


def test_late_states_are_drawn_of_each_sample() -> None:
    published = LateStates(low=30)
    assert {published.draw(40, seed, 1).kept for seed in range(200)} == {(state,) for state in range(30, 40)}
    assert LateStates().draw(8, 3, 1).kept[0] in (6, 7)
    assert LateStates(count=4, low=4).draw(8, 0, 1).states == (4, 5, 6, 7)
    assert LateStates(low=7).draw(8, 0, 1) == LateStates().draw(8, 1, 1).__class__(stochastic=(), trained=(), kept=(7,))
    assert LateStates().draw(1, 0, 1).kept == (0,)
    for plan in (LateStates(low=8), LateStates(count=3), LateStates(high=9)):
        with pytest.raises(ValueError, match=r"cannot be drawn from \["):
            plan.draw(8, 0, 1)
