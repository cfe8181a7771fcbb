"""The simulated rater of ``tools.taste``: it answers through the page, by its rule, the opposite, or at random."""

from __future__ import annotations

import pytest

from flowmill.models.rewards.factory import make_reward
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.ratings.answers import answers_of
from flowmill.tasks.ratings.request import RateRequest
from flowmill.tasks.runs.context import RunContext
from tools.taste import rate, rater_of

RULE = "jpeg_compressibility"


@pytest.mark.parametrize(("kind", "least", "most"), [("true", 0.7, 1.0), ("inverted", 0.0, 0.3), ("coin", 0.15, 0.85)])
def test_a_rater_follows_its_rule_with_noise(kind: str, least: float, most: float, context: RunContext) -> None:
    for seed in range(3):
        rate(context, rater_of(kind, RULE, seed), RateRequest(run="small", epoch=1, rater=f"{kind}{seed}", seed=seed))
    answers = [answer for answer in answers_of(context.run).values() if answer.preferred in (0.0, 1.0)]
    pictures = RunView(context).pictures(1, evaluation=False)
    scores = {
        name: make_reward(RULE, {}).score(pixels[None], [""], [{}]).values[0] for name, pixels in pictures.items()
    }
    right = [(scores[each.first_sample] > scores[each.second_sample]) == each.preferred for each in answers]
    assert len(right) > 20
    assert least <= sum(right) / len(right) <= most


def test_a_rater_of_sums_prefers_the_right_one() -> None:
    pair = {"prompt": "12+34=", "samples": [{"text": "46"}, {"text": "47"}]}
    for kind, most in (("true", "left"), ("inverted", "right")):
        rater = rater_of(kind, "exact_text", 0)
        answers = [rater(None, pair) for _ in range(50)]  # type: ignore[arg-type]
        assert answers.count(most) > 35
