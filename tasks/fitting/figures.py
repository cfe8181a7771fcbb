"""Figures of a fitted reward on held-out judgments, and the card that lists them. No torch.

Legend: R held-out judgments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.escaping import in_code, in_markdown
from tasks.algorithms.resampling import FEWEST, mean_with_interval
from tasks.fitting.judgments import Judgment

_BINS = 5


def figures_of_preferences(rows: Sequence[Judgment], difference: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Return accuracy, calibration, and agreement with each rater.

    Accuracy is the share of judgments, without ties, whose preferred side has the higher score.

    Args:
        rows: R judgments.
        difference: (R,) score of the first less that of the second.
        expected: (R,) expected judgments.

    Raises:
        ConfigError: no judgment prefers one side.
    """
    values = np.array([row.value for row in rows])
    decided = np.flatnonzero(values != 0.5).tolist()
    correct = np.where(difference == 0, 0.5, (difference > 0) == (values == 1)).astype(np.float64)
    return {
        "accuracy": _by_prompt([rows[each] for each in decided], correct[decided]),
        "ties": len(rows) - len(decided),
        "calibration": _calibration(values, expected),
        "raters": {
            rater: {"judgments": len(mine), "agreement": float(correct[mine].mean())}
            for rater, mine in _raters(rows, decided)
        },
    }


def figures_of_ratings(rows: Sequence[Judgment], scores: np.ndarray, seed: int) -> dict[str, Any]:
    """Return accuracy, error, calibration, and the error per rater.

    Accuracy is the share of random pairs of judgments with different ratings, each in one pair, that scores order
    as the ratings do.

    Args:
        rows: R judgments.
        scores: (R,) scores.
        seed: seed of the pairs.

    Raises:
        ConfigError: no judgment prefers one side.
    """
    values = np.array([row.value for row in rows])
    drawn = np.random.default_rng(seed).permutation(len(rows))[: len(rows) // 2 * 2].reshape(-1, 2)
    first, second = drawn[values[drawn[:, 0]] != values[drawn[:, 1]]].T
    ordered = (scores[first] - scores[second]) * (values[first] - values[second])
    errors = (scores - values) ** 2
    return {
        "accuracy": _estimate(np.where(ordered == 0, 0.5, ordered > 0), "pairs"),
        "error": float(np.sqrt(errors.mean())),
        "deviation": float(values.std()),
        "calibration": _binned(scores, values, np.quantile(scores, np.linspace(0, 1, _BINS + 1)[1:-1])),
        "raters": {
            rater: {"judgments": len(mine), "error": float(np.sqrt(errors[mine].mean()))}
            for rater, mine in _raters(rows, range(len(rows)))
        },
    }


def _raters(rows: Sequence[Judgment], counted: Iterable[int]) -> list[tuple[str, list[int]]]:
    """Return the counted rows of each rater, by name."""
    found: dict[str, list[int]] = {}
    for each in counted:
        found.setdefault(rows[each].rater, []).append(each)
    return sorted(found.items())


def _by_prompt(rows: Sequence[Judgment], correct: np.ndarray) -> dict[str, Any]:
    """Return an accuracy whose units are prompts, or judgments where there are too few prompts for an interval."""
    prompts: dict[str, list[float]] = {}
    for row, value in zip(rows, correct.tolist(), strict=True):
        prompts.setdefault(row.prompt, []).append(value)
    if len(prompts) < FEWEST:
        return _estimate(correct, "judgments")
    return _estimate(np.array([np.mean(values) for values in prompts.values()]), "prompts")


def _estimate(values: np.ndarray, unit: str) -> dict[str, Any]:
    if not len(values):
        raise ConfigError("data: all held-out judgments are ties or equal ratings, which measure nothing. Judge more.")
    found = mean_with_interval(values, bounds=(0, 1))
    return {"mean": found.mean, "low": found.low, "high": found.high, "count": len(values), "unit": unit}


def _calibration(values: np.ndarray, expected: np.ndarray) -> list[dict[str, float]]:
    """Return mean expected and observed preference for the side that is expected to win, in bins of the former."""
    favored = expected >= 0.5
    predicted, observed = np.where(favored, expected, 1 - expected), np.where(favored, values, 1 - values)
    return _binned(predicted, observed, np.linspace(0.5, 1, _BINS + 1)[1:-1])


def _binned(predicted: np.ndarray, observed: np.ndarray, limits: np.ndarray) -> list[dict[str, float]]:
    number = np.searchsorted(limits, predicted, side="right")
    return [
        {
            "count": int((number == each).sum()),
            "predicted": float(predicted[number == each].mean()),
            "observed": float(observed[number == each].mean()),
        }
        for each in sorted(set(number.tolist()))
    ]


def accuracy_text(about: Mapping[str, Any]) -> str:
    """Return the accuracy with its interval as a sentence."""
    found = about["heldout"]["accuracy"]
    interval = "" if found["low"] is None else f" (95 %: {found['low']:.3f} to {found['high']:.3f})"
    return f"held-out accuracy {found['mean']:.3f}{interval} over {found['count']} {found['unit']}"


def card(about: Mapping[str, Any]) -> str:
    """Return the card of a fitted reward, in Markdown."""
    data, found = about["data"], about["heldout"]
    figure = "error" if "error" in found else "agreement"
    rest = (
        f"Error {found['error']:.3f} (RMS), where ratings deviate by {found['deviation']:.3f}."
        if "error" in found
        else f"{found['ties']} of the held-out judgments are ties, which do not count in the accuracy."
    )
    lora, trained = about.get("lora"), about.get("trained", {})
    fitted = (
        f"Adapters of the backbone have rank {lora['rank']}, alpha {lora['alpha']} and {trained['adapters']:,} trained "
        f"parameters, the head {trained['head']:,}. They need the model that they were trained on.\n\n"
        if lora
        else ""
    )
    head = (
        f"# Fitted reward\n\nBackbone {in_code(about['backbone']['name'])}, fitted on {data['train']} {data['kind']} "
        f"of {data['prompts']} prompts ({data['media']} {data['judged']}); {data['heldout']} are held out.\n\n{fitted}"
        f"{accuracy_text(about).capitalize()}. {rest}\n"
    )
    tables = {
        "Calibration": [("judgments", "predicted", "observed"), *(tuple(row.values()) for row in found["calibration"])],
        "Raters": [("rater", "judgments", figure), *((rater, *row.values()) for rater, row in found["raters"].items())],
        "Training": [("update", "loss", "held-out loss"), *(tuple(row.values()) for row in about["curve"])],
        "Judgments": [("source", "count"), *data["sources"].items()],
    }
    return head + "".join(f"\n## {title}\n\n{_table(rows)}" for title, rows in tables.items())


def _table(rows: Sequence[Sequence[Any]]) -> str:
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else in_markdown(str(cell)) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:]))
