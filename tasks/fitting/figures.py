"""Figures of a fitted reward on held-out judgments, and the card that lists them. No torch.

Legend: R held-out judgments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import in_code, in_markdown
from flowmill.tasks.algorithms.resampling import mean_with_interval
from flowmill.tasks.export.provenance import ANY_PROMPTS, accuracy_text
from flowmill.tasks.fitting.judgments import Judgment
from flowmill.tasks.fitting.splits import connected, prompt_or_items

_BINS = 5
#: Most rated samples of a prompt of which each is compared with each.
_PART = 32


def figures_of_preferences(rows: Sequence[Judgment], difference: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Return accuracy, calibration, and agreement with each rater.

    Accuracy is the share of judgments, without ties, whose preferred side has the higher score, as the mean over
    prompts: judgments of one prompt are not independent.

    Args:
        rows: R judgments.
        difference: (R,) score of the first less that of the second.
        expected: (R,) expected judgments.
    """
    values = np.array([row.value for row in rows])
    decided = np.flatnonzero(values != 0.5)
    correct = np.where(difference == 0, 0.5, (difference > 0) == (values == 1)).astype(np.float64)
    units = connected([rows[each] for each in decided.tolist()], prompt_or_items)
    return {
        "accuracy": _of_units([correct[decided[unit]] for unit in units], "prompts"),
        "ties": len(rows) - len(decided),
        "calibration": _calibration(values, expected),
        "raters": {
            rater: {"judgments": len(mine), "agreement": float(correct[mine].mean())}
            for rater, mine in _raters(rows, decided.tolist())
        },
    }


def figures_of_ratings(rows: Sequence[Judgment], scores: np.ndarray, seed: int) -> dict[str, Any]:
    """Return accuracy, error, calibration, and the error per rater.

    Accuracy is the share of pairs of judgments with different ratings that scores order as the ratings do, as the mean
    over prompts. Both judgments of a pair have one prompt, as RL compares samples of one prompt: scores that only tell
    prompts apart are right in half of the pairs. If no prompt has such a pair, pairs of different prompts say how well
    ratings are predicted, and there is no interval.

    Args:
        rows: R judgments.
        scores: (R,) scores.
        seed: seed of the pairs of prompts with many judgments.
    """
    values = np.array([row.value for row in rows])
    errors = (scores - values) ** 2
    pairs, unit = _pairs(rows, values, np.random.default_rng(seed))
    return {
        "accuracy": _of_units([_ordered(values[each], scores[each]) for each in pairs], unit),
        "error": float(np.sqrt(errors.mean())),
        "deviation": float(values.std()),
        "calibration": _binned(scores, values, np.quantile(scores, np.linspace(0, 1, _BINS + 1)[1:-1])),
        "raters": {
            rater: {"judgments": len(mine), "error": float(np.sqrt(errors[mine].mean()))}
            for rater, mine in _raters(rows, range(len(rows)))
        },
    }


def _pairs(rows: Sequence[Judgment], values: np.ndarray, draw: np.random.Generator) -> tuple[list[np.ndarray], str]:
    """Return the pairs of rows with different ratings, (K, 2) of each unit, and what the units are.

    Of a prompt these are all pairs within random parts of its rows. Otherwise a unit is one pair, and each row in one.
    """
    prompts: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        prompts.setdefault(row.prompt, []).append(number)
    units = []
    for own in map(draw.permutation, prompts.values()) if any(prompts) else ():
        parts = np.array_split(own, -(-len(own) // _PART))
        units.append(np.concatenate([part[np.stack(np.triu_indices(len(part), 1), axis=1)] for part in parts]))
    unit = "prompts"
    if not any(len(_differing(pairs, values)) for pairs in units):
        units = list(draw.permutation(len(rows))[: len(rows) // 2 * 2].reshape(-1, 1, 2))
        unit = ANY_PROMPTS if any(prompts) else "pairs"
    differing = [_differing(pairs, values) for pairs in units]
    return [pairs for pairs in differing if len(pairs)], unit


def _differing(pairs: np.ndarray, values: np.ndarray) -> np.ndarray:
    differing: np.ndarray = pairs[values[pairs[:, 0]] != values[pairs[:, 1]]]
    return differing


def _ordered(values: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return whether scores order pairs as ratings do, 0.5 for equal scores; both (K, 2)."""
    ordered = (scores[:, 0] - scores[:, 1]) * (values[:, 0] - values[:, 1])
    return np.where(ordered == 0, 0.5, ordered > 0)


def _raters(rows: Sequence[Judgment], counted: Iterable[int]) -> list[tuple[str, list[int]]]:
    by_rater: dict[str, list[int]] = {}
    for each in counted:
        by_rater.setdefault(rows[each].rater, []).append(each)
    return sorted(by_rater.items())


def _of_units(correct: Sequence[np.ndarray], unit: str) -> dict[str, Any]:
    """Return an accuracy with its interval over units, each with its mean."""
    if not correct:
        raise ConfigError("data: all held-out judgments are ties or equal ratings, which measure nothing. Judge more.")
    estimate = mean_with_interval(np.array([each.mean() for each in correct]), bounds=(0, 1))
    low, high = (None, None) if unit == ANY_PROMPTS else (estimate.low, estimate.high)
    return {"mean": estimate.mean, "low": low, "high": high, "count": len(correct), "unit": unit}


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


def equal_text(fit: Mapping[str, Any]) -> str:
    """Return what is said of judgments of equal media after the others; '' without any."""
    count = fit["data"].get("equal", 0)
    return f", and {count:,} of two equal {fit['data']['judged']} are left out" if count else ""


def card(fit: Mapping[str, Any]) -> str:
    """Return the card of a fitted reward, in Markdown."""
    data, results = fit["data"], fit["heldout"]
    figure = "error" if "error" in results else "agreement"
    rest = (
        f"Error {results['error']:.3f} (RMS), where ratings deviate by {results['deviation']:.3f}."
        if "error" in results
        else f"{results['ties']} of the held-out judgments are ties, which do not count in the accuracy."
    )
    lora, trained = fit.get("lora"), fit.get("trained", {})
    fitted = (
        f"Adapters of the backbone have rank {lora['rank']}, alpha {lora['alpha']} and {trained['adapters']:,} trained "
        f"parameters, the head {trained['head']:,}. They need the model that they were trained on.\n\n"
        if lora
        else ""
    )
    head = (
        f"# Fitted reward\n\nBackbone {in_code(fit['backbone']['name'])}, fitted on {data['train']} {data['kind']} "
        f"of {data['prompts']} prompts ({data['media']} {data['judged']}); {data['heldout']} are held out"
        f"{equal_text(fit)}.\n\n{fitted}"
        f"{accuracy_text(fit).capitalize()}. {rest}\n"
    )
    tables = {
        "Calibration": [
            ("judgments", "predicted", "observed"),
            *(tuple(row.values()) for row in results["calibration"]),
        ],
        "Raters": [
            ("rater", "judgments", figure),
            *((rater, *row.values()) for rater, row in results["raters"].items()),
        ],
        "Training": [("update", "loss", "held-out loss"), *(tuple(row.values()) for row in fit["curve"])],
        "Judgments": [("source", "count"), *data["sources"].items()],
    }
    return head + "".join(f"\n## {title}\n\n{_table(rows)}" for title, rows in tables.items())


def _table(rows: Sequence[Sequence[Any]]) -> str:
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else in_markdown(str(cell)) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:]))
