"""How often alerts and fitted rewards err where nothing is wrong, and whether collapses are seen and undone.

Changes of held-out scores are simulated; fits and epochs are real ones of the quickstart's smallest models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
from PIL import Image

from flowmill.configs.reward_fit import load_fit
from flowmill.tasks.algorithms.resampling import chance_of_fall
from flowmill.tasks.fitting.fit import fit_reward
from flowmill.tasks.metrics.alerts import FALSE_ALARMS, Watcher
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.runs.context import RunContext
from tools.benchmarks.learning import trained

RUNS = 20
#: Changes of held-out scores with mean 0, and the largest possible gain.
CHANGES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda draw, n: draw.normal(0, 1, n), np.inf),
    "lognormal, sigma 1": (lambda draw, n: draw.lognormal(0, 1, n) - np.exp(0.5), np.inf),
    "lognormal, sigma 1.5": (lambda draw, n: draw.lognormal(0, 1.5, n) - np.exp(1.125), np.inf),
    "a gain in 50 prompts, of a score from 0 to 1": (lambda draw, n: np.where(draw.random(n) < 0.02, 0.98, -0.02), 1.0),
    "a gain in 10 prompts, of a score from 0 to 1": (lambda draw, n: np.where(draw.random(n) < 0.1, 0.9, -0.1), 1.0),
}
#: Runs in which every fit or epoch is sound or worthless by construction.
COLLAPSE = ["optimize.learning_rate=0.03", "optimize.updates_per_epoch=1", "optimize.schedule=null", "run.epochs=2"]


def table() -> str:
    """Return the rates as a Markdown table."""
    rows = [*_falls(), *_fits(), *_epochs(), *_collapses()]
    return "\n".join(["| event | runs | rate |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _falls() -> Iterable[tuple[str, str, str]]:
    """Yield the share of runs in which one of six evaluations is called a fall, with 36, 64 and 500 prompts."""
    levels = [FALSE_ALARMS * 6 / (np.pi * k) ** 2 for k in range(1, 7)]
    for name, (make, most) in CHANGES.items():
        rates = []
        for prompts in (36, 64, 500):
            draw, runs = np.random.default_rng(prompts), 10 * RUNS
            chances = ([chance_of_fall(make(draw, prompts), most=most) for _ in levels] for _ in range(runs))
            rates.append(f"{sum(bool(np.any(np.array(each) <= levels)) for each in chances) / runs:.3f}")
        yield f"`heldout` fires on changes without a fall: {name}", str(10 * RUNS), ", ".join(rates)


def _fits() -> Iterable[tuple[str, str, str]]:
    """Yield the share of worthless rewards that runs would accept."""
    for name, write in (("preferences by a coin per prompt", _coins), ("ratings of scenes", _scenes)):
        proven = sum(not _fitted(write, seed) for seed in range(RUNS))
        yield f"a worthless reward is not taken for chance: {name}", str(RUNS), f"{proven / RUNS:.2f}"


def _fitted(write: Callable[[Path, int], list[dict[str, object]]], seed: int) -> bool:
    """Fit a reward on judgments; return whether it may be chance."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = write(folder, seed)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        backbone = "backbone: {name: pixels, options: {height: 4, width: 4}}"
        (folder / "fit.yaml").write_text(f"{{data: rows.jsonl, updates: 60, seed: {seed}, {backbone}}}")
        return fit_reward(load_fit(folder / "fit.yaml", [f"store.root={folder / 'store'}"])).may_be_chance


def _coins(folder: Path, seed: int) -> list[dict[str, object]]:
    """Return 20 preferences of each of 40 prompts, all of a prompt for the bright or all for the dark image."""
    draw, rows = np.random.default_rng(seed), list[dict[str, object]]()
    for prompt in range(40):
        bright = draw.random() < 0.5
        for number in range(20):
            levels = sorted(draw.choice(245, 2, replace=False), reverse=bright)
            names = [_image(folder / f"{prompt}-{number}-{level}.png", level, draw) for level in levels]
            rows.append({"prompt": f"p{prompt}", "chosen": names[0], "rejected": names[1]})
    return rows


def _scenes(folder: Path, seed: int) -> list[dict[str, object]]:
    """Return ratings of four images of each of 150 prompts, which depend on the prompt's brightness alone."""
    draw, rows = np.random.default_rng(seed), list[dict[str, object]]()
    for prompt in range(150):
        level = int(draw.integers(20, 230))
        for number in range(4):
            rating = int(np.clip(round(1 + 4 * (level - 20) / 210 + draw.normal() * 0.5), 1, 5))
            name = _image(folder / f"{prompt}-{number}.png", level, draw)
            rows.append({"prompt": f"p{prompt}", "image": name, "rating": rating})
    return rows


def _image(path: Path, level: int, draw: np.random.Generator) -> str:
    pixels = np.clip(level + draw.integers(0, 9, (4, 4, 3)), 0, 255)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path.name


def _epochs() -> Iterable[tuple[str, str, str]]:
    """Yield the share of first epochs in which any alert fires, and the largest KL of one."""
    for preset in ("addition_grpo", "addition_ppo", "digits"):
        fired, largest, root = 0, 0.0, mkdtemp()
        for seed in range(RUNS):
            one = (f"run.seed={seed}", f"run.name={preset}-{seed}", "run.epochs=1")
            context = trained(preset, root, *one, evaluated=False)
            watcher = Watcher(context.chain)
            fired += bool(watcher.all())
            largest = max(largest, watcher.history().epochs[0]["optimize/kl_epoch"])
        yield (
            f"an alert fires in the first epoch of `{preset}` (largest `kl_epoch` {largest:.2g})",
            str(RUNS),
            (f"{fired / RUNS:.2f}"),
        )


def _collapses() -> Iterable[tuple[str, str, str]]:
    """Yield whether runs that collapse are told of, and what is left of their held-out score."""
    for stop in ([], ["optimize.stop_kl=0.1"]):
        seen, scores, root = 0, list[float](), mkdtemp()
        for seed in range(3):
            one = (f"run.seed={seed}", f"run.name=collapse-{seed}")
            context = trained("addition_grpo", root, *COLLAPSE, *stop, *one)
            seen += any(alert.rule == "kl" and alert.epoch == 1 for alert in Watcher(context.chain).all())
            scores += [_score(context, epoch) for epoch in (0, 2)]
        changes = ", ".join(f"{first:.2f} -> {last:.2f}" for first, last in zip(scores[::2], scores[1::2], strict=True))
        how = f"`addition_grpo` at a rate of 0.03, one update per epoch{', `stop_kl: 0.1`' * bool(stop)}"
        yield f"`kl` fires in the first epoch of {how} (held-out score {changes})", "3", f"{seen / 3:.2f}"


def _score(context: RunContext, epoch: int) -> float:
    return evaluation_figures(context.chain, epoch)["heldout"]["exact_text"]["mean"]
