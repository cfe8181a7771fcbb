"""Direct-Align and SRPO: images recovered on both branches, what they do to a velocity, relative scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.tasks.algorithms.climbing import reward_shortfall
from flowmill.tasks.algorithms.diffusion import Question, Subjects
from flowmill.tasks.algorithms.direct_align import DirectAlign
from tests.golden.algorithms2026.rows import check, given, noised
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]

WORDS: dict[str, Any] = {"positive": ("Real",), "negative": ("Oil",)}


def subjects(rows: int) -> Subjects:
    return Subjects(prompts=("a cat",) * rows, metadata=({},) * rows, samples=("a",) * rows, draws=(0,) * rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("branch", ["inv0", "inv1"])
def test_recovered_images_and_their_gradient(vectors: Open, branch: str, dtype: torch.dtype) -> None:
    data, meta = vectors("srpo.npz")
    inverting = branch == "inv0"
    sigmas = data.tensor("sigmas", torch.float64)
    low, high = sigmas[meta["t_base"]], sigmas[meta["t_start"]]
    clean, noise, velocity, weight = (
        data.tensor(f"{branch}_{name}", dtype) for name in ("latent_start", "noise", "pred", "w")
    )
    rows, velocity = len(clean), velocity.requires_grad_()
    level = torch.full((rows,), float(low if inverting else high), dtype=dtype)
    batch = replace(noised(clean, noise, level, torch.ones(rows, dtype=dtype)), subjects=subjects(rows))
    check(batch.latents, data, f"{branch}_noisy")
    seen: list[Tensor] = []

    def rewards(latents: Tensor, reported: Subjects, questions: Sequence[Question]) -> Tensor:
        seen.append(latents)
        # Of the two branches the one in question counts.
        counts = float((len(seen) == 2) is inverting)
        return counts * (latents * weight).flatten(1).sum(1)

    models = given(velocity, velocity, velocity)
    models.rewards = rewards
    # Half of two branches, where the public code has one after the other.
    found = DirectAlign(step=float(high - low), times={"high": 0.8}, scale=2.0, **WORDS).loss(batch, models)
    check(seen[int(inverting)], data, f"{branch}_recovered")
    (slope,) = torch.autograd.grad(found.loss.sum(), velocity)
    # Theirs is of the sum that is to fall; a reward rises.
    check(-slope, data, f"{branch}_grad_pred")


def test_relative_scores(vectors: Open) -> None:
    data, meta = vectors("srpo.npz")
    image, positive, negative = (data.tensor(name, torch.float64) for name in ("image", "positive", "negative"))
    rows, k = len(image), float(meta["k"])
    texts = {"Real. a cat": positive, "Oil. a cat": negative}

    def rewards(latents: Tensor, reported: Subjects, questions: Sequence[Question]) -> Tensor:
        return torch.stack([each.factor * (image * texts[each.prompts[0]]).sum(1) for each in questions]).sum(0)

    batch = noised(torch.zeros(rows, 2), torch.zeros(rows, 2), torch.full((rows,), 0.5), torch.ones(rows))
    models = given(torch.zeros(rows, 2), torch.zeros(rows, 2), torch.zeros(rows, 2))
    models.rewards = rewards
    algorithm = DirectAlign(denoising=(k, k), inverting=(k, k), step=0.01, margin=0.7, **WORDS)
    found = algorithm.loss(replace(batch, subjects=subjects(rows)), models)
    check(found.metrics["relative_reward"], data, "score")
    check(reward_shortfall(found.metrics["relative_reward"], 0.7).mean(), data, "loss")
    backwards = (image * ((1 + k) * negative - positive)).sum(1)
    torch.testing.assert_close(found.metrics["inverted_reward"], backwards)
    shortfalls = [(0.7 - each).clamp(min=0) for each in (data.tensor("score", torch.float64), backwards)]
    torch.testing.assert_close(found.loss, (shortfalls[0] + shortfalls[1]) / 2, rtol=1e-5, atol=1e-5)
