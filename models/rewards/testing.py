"""The contract of rewards, as checks that a test of any package can run on its own reward.

    @pytest.mark.parametrize("holds", CONTRACT, ids=lambda check: check.__name__)
    def test_my_reward_keeps_the_contract(holds):
        holds(MyReward(), samples())

Each check raises AssertionError with its finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowmill.models.rewards.base import Batch, Needs, Reward, Scores
from flowmill.models.rewards.invocation import Handling, declared_needs, score
from flowmill.models.rewards.service import wire

Check = Callable[[Reward, Batch], None]
#: Tolerance between scores of one sample in calls with other rows: kernels depend on the number of rows.
_TOLERANCE = 1e-5


def samples(
    count: int = 6,
    *,
    shape: Sequence[int] = (64, 64, 3),
    latents: bool = False,
    texts: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    references: int = 0,
) -> Batch:
    """Return random samples.

    Args:
        shape: shape of one, (H, W, 3), (F, H, W, 3) or of latents.
        latents: float32 latents instead of uint8 media.
        texts: texts, repeated as needed, instead of media.
        prompts: prompts, repeated as needed.
        metadata: other columns of every prompt.
        references: number of source images of every prompt.
    """
    draw, full = np.random.default_rng(0), (count, *shape)
    media = draw.standard_normal(full, np.float32) if latents else draw.integers(0, 256, full, np.uint8)
    if texts is not None:
        media = np.array([texts[row % len(texts)] for row in range(count)], dtype=object)
    cycled = prompts or [f'a sign that says "{number:02d}"' for number in range(count)]
    return Batch(
        media=media,
        prompts=[cycled[row % len(cycled)] for row in range(count)],
        metadata=[dict(metadata or {})] * count,
        groups=[str(row // 2) for row in range(count)],
        references=random_references(count, references),
    )


def random_references(count: int, images: int) -> list[list[np.ndarray]]:
    """Return random source images of every prompt; empty if ``images`` is 0."""
    draw = np.random.default_rng(1)
    references = [[draw.integers(0, 256, (48 + 8 * n, 64, 3), np.uint8) for n in range(images)] for _ in range(count)]
    for image in (image for row in references for image in row):
        image.setflags(write=False)
    return references if images else []


def declares_what_it_needs(reward: Reward, batch: Batch) -> None:
    """``needs`` is a ``Needs``, and the samples have the columns it names."""
    needs = declared_needs(reward)
    assert isinstance(needs, Needs), f"'needs' is {needs!r}; it must be a flowmill.models.rewards.base.Needs"
    for column in needs.columns:
        assert all(column in row for row in batch.metadata), f"the samples lack the column '{column}'"


def gives_one_finite_score_each(reward: Reward, batch: Batch) -> None:
    """One finite float32 per sample, and a note for each or none."""
    scores = _score(reward, batch)
    assert scores.values.dtype == np.float32
    assert scores.values.shape == (len(batch),), f"{scores.values.shape} scores of {len(batch)} samples"
    assert np.isfinite(scores.values).all(), f"scores are {scores.values}"
    assert scores.notes is None or len(scores.notes) == len(batch)


def gives_the_same_scores_again(reward: Reward, batch: Batch) -> None:
    """Equal samples have equal scores: the reward is deterministic and keeps no state."""
    first, second = _score(reward, batch), _score(reward, batch)
    np.testing.assert_array_equal(first.values, second.values)
    assert list(first.notes or []) == list(second.notes or [])


def scores_no_sample_by_its_neighbors(reward: Reward, batch: Batch) -> None:
    """A sample, or a group for a groupwise reward, has the same scores as alone."""
    together = _score(reward, batch).values
    for rows in _apart(reward, batch):
        alone = _score(reward, batch.take(rows)).values
        np.testing.assert_allclose(alone, together[rows], rtol=_TOLERANCE, atol=_TOLERANCE)


def follows_its_samples(reward: Reward, batch: Batch) -> None:
    """Scores are in the order of the samples, or of the groups for a groupwise reward."""
    order = [row for rows in reversed(_apart(reward, batch)) for row in rows]
    expected = _score(reward, batch).values[order]
    np.testing.assert_allclose(_score(reward, batch.take(order)).values, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def leaves_its_samples_alone(reward: Reward, batch: Batch) -> None:
    """Media, prompts and metadata are not changed."""
    media, prompts, metadata = batch.media.copy(), list(batch.prompts), [dict(row) for row in batch.metadata]
    _score(reward, batch)
    np.testing.assert_array_equal(batch.media, media)
    assert list(batch.prompts) == prompts
    assert [dict(row) for row in batch.metadata] == metadata


def scores_what_a_server_hands_over(reward: Reward, batch: Batch) -> None:
    """Samples that were packed and unpacked score the same; their media are read-only."""
    sent = wire.unpack_request(wire.pack_request(batch))
    received = replace(sent, groups=batch.groups)
    scores = _score(reward, received)
    answered = wire.unpack_answer(wire.pack_answer(scores), len(batch))
    np.testing.assert_array_equal(answered.values, _score(reward, batch).values)


#: Every check.
CONTRACT: tuple[Check, ...] = (
    declares_what_it_needs,
    gives_one_finite_score_each,
    gives_the_same_scores_again,
    scores_no_sample_by_its_neighbors,
    follows_its_samples,
    leaves_its_samples_alone,
    scores_what_a_server_hands_over,
)


def _score(reward: Reward, batch: Batch) -> Scores:
    return score(reward, type(reward).__name__, batch, Handling(frames="clip"))


def _apart(reward: Reward, batch: Batch) -> list[list[int]]:
    """Return the rows that belong in the same call: single ones, or groups."""
    if not declared_needs(reward).groupwise:
        return [[row] for row in range(len(batch))]
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(batch.groups):
        groups.setdefault(group, []).append(row)
    return list(groups.values())
