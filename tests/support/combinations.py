"""Every sampler with every plan, algorithm and way to make advantages: refused by check, or one correct update.

``python -m tests.support.combinations`` tries all of them and prints how many were refused, and why; the test suite
tries every (sampler, plan, algorithm) with advantages that take turns. One tiny model is held for all, and combinations
with the same rollout share it, as runs of one store do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import AdvantageSection, RunConfig
from flowmill.models import maths
from flowmill.models.maths import KERNELS
from flowmill.models.policies.trainable import Trainable
from flowmill.models.quickstart.pipeline import tiny_pipeline
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks import algorithms
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.components import make_algorithm
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage import Shard
from tests.support.inside import make_stage, run_stage, session_of, stage_run

Options = Mapping[str, Any]

STEPS, GROUP, ROWS = 3, 4, 16
SAMPLERS: dict[str, tuple[str, Options]] = {
    **{name: (name, {}) for name in KERNELS},
    "cps squared": ("cps", {"log_prob": "squared"}),
}
PLANS: dict[str, tuple[str, Options]] = {
    **{name: (name, {}) for name in maths.PLANS},
    "all, last sde": ("all", {"last": "sde"}),
    "all, last trained": ("all", {"last": "train"}),
    "window to the end": ("window", {"size": 1, "high": STEPS}),
    "progressive window": ("window", {"size": 1, "mode": "progressive"}),
    "subset with the last": ("subset", {"count": 1, "candidates": (0, 2)}),
    "all, final kept": ("all", {"keep_final": True}),
    "branch": ("branch", {"branches": 2}),
    "branch at the last": ("branch", {"branches": 2, "steps": (2,)}),
}
_ONE_LEVEL = {"times": {"count": 1}}
ALGORITHMS: dict[str, tuple[str, Options]] = {
    **{name: (name, {}) for name in algorithms.ALGORITHMS},
    **{
        name: (name, _ONE_LEVEL)
        for name in ("nft", "awm", "v_grpo", "dpo", "dgpo", "crd", "ram", "reward_gradient", "direct_align")
    },
    "reward_gradient, linear": ("reward_gradient", {"target": "linear", **_ONE_LEVEL}),
    "direct_align, SRPO": (
        "direct_align",
        {"positive": ("Bright",), "negative": ("Dark",), "step": 0.1, "times": {"count": 1, "high": 0.8}},
    ),
    "refl, K": ("refl", {"steps": 2, "truncate": True}),
    "dpo, SDPO": ("dpo", {"winner_margin": 0.5}),
    "grpo, SPO": ("grpo", {"surrogate": "spo"}),
    "grpo, KL": ("grpo", {"kl_coef": 0.1}),
    "grpo, KL to the average": ("grpo", {"kl_coef": 0.1, "kl_reference": "average"}),
    "grpo, from means": ("grpo", {"from_means": True}),
    "grpo, sums": ("grpo", {"reduce": "sum", "clip_range": 0.2}),
}
#: Algorithms with a policy ratio, which is exactly 1 before the first update.
RATIOS = {"fdfo", "grpo", "tempflow", "flash_grpo", "grpo_guard", "flow_dppo", "awm", "v_grpo"}
#: By how much log-probs of rollout and training may differ where batches have other sizes.
_ROUNDING = 1e-6
_RUNNING = {"min_count": GROUP, "buffer": 2 * GROUP}
ADVANTAGES: list[dict[str, Any]] = [
    {"std": std, "aggregation": together, "mode": mode, "best_of": best_of, **(_RUNNING if std == "running" else {})}
    for std in ("group", "global", "running")
    for together in ("sum", "gdpo")
    for mode in ("all", "positive_only", "negative_only", "binary", "best_worst")
    for best_of in (None, 2)
] + [{"kl_coef": 0.1}, {"soft_clip": 3.0}]


class Brightness:
    """Bright images are good."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return media.reshape(len(media), -1).mean(1)

    def differentiable(self, media: torch.Tensor, prompts: Sequence[str], metadata: Any) -> torch.Tensor:
        return media.flatten(1).mean(1)


class Contrast:
    """Images with differences are good."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return media.reshape(len(media), -1).std(1)

    def differentiable(self, media: torch.Tensor, prompts: Sequence[str], metadata: Any) -> torch.Tensor:
        return media.flatten(1).std(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination, by name and the number of its advantages."""

    sampler: str
    plan: str
    algorithm: str
    advantage: int

    @property
    def pairs(self) -> set[frozenset[tuple[str, Any]]]:
        """Every two settings that meet in it."""
        advantage = ADVANTAGES[self.advantage]
        settings = [("sampler", self.sampler), ("plan", self.plan), ("algorithm", self.algorithm)]
        settings += [(name, advantage[name]) for name in ("std", "aggregation", "mode", "best_of") if name in advantage]
        return {frozenset(pair) for pair in itertools.combinations(settings, 2)}


def every_case(part: int = 0, parts: int = 1) -> Iterator[Case]:
    """Yield all combinations, or one of several parts; those that share rollouts are neighbors."""
    for sampler, plan in list(itertools.product(SAMPLERS, PLANS))[part::parts]:
        for advantage, algorithm in itertools.product(range(len(ADVANTAGES)), ALGORITHMS):
            yield Case(sampler=sampler, plan=plan, algorithm=algorithm, advantage=advantage)


def some_cases() -> list[Case]:
    """Return every (sampler, plan, algorithm) once, with advantages that take turns."""
    triples = itertools.product(SAMPLERS, PLANS, ALGORITHMS)
    # 23 and 61 have no common divisor, so every triple meets another place of the list.
    return [
        Case(sampler=sampler, plan=plan, algorithm=algorithm, advantage=number * 23 % len(ADVANTAGES))
        for number, (sampler, plan, algorithm) in enumerate(triples)
    ]


class Bench:
    """A store, a tiny model, and everything that combinations share."""

    def __init__(self, base: Path, teacher: Path, scratch: Path) -> None:
        """Bind to folders of two models and one to write to."""
        prompts = scratch / "prompts.txt"
        prompts.write_text("".join(f'"{number:02d}"\n' for number in range(4)))
        self.scratch = scratch
        self._teacher = str(teacher)
        self._template = RunConfig.model_validate(
            {
                "run": {"name": "combinations"},
                "store": {"root": str(scratch / "store")},
                "model": {
                    "policy": "sd3",
                    "path": str(base),
                    "height": 16,
                    "width": 32,
                    "lora": {"rank": 2, "alpha": 4, "targets": ["attn.to_q", "attn.to_v"]},
                    "options": {"max_sequence_length": 1, "schedule": "linear"},
                },
                "prompts": {"train": str(prompts)},
                "rollout": {"prompts_per_epoch": 2, "group_size": GROUP, "steps": STEPS},
                "rewards": [
                    {"name": "tests.support.combinations:Brightness"},
                    {"name": "tests.support.combinations:Contrast", "weight": 0.5},
                ],
                "optimize": {"updates_per_epoch": 1, "ema": {"decay": 0.5}},
                "execution": {"rollout_batch_size": ROWS, "micro_batch_size": ROWS},
            }
        )
        self._advantages = [AdvantageSection.model_validate(options) for options in ADVANTAGES]
        self._held: Trainable | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._contexts: dict[str, RunContext] = {}
        self._live: dict[tuple[str, int], bool] = {}
        self._current: dict[str, int] = {}

    def config(self, case: Case) -> RunConfig:
        """Return the config of a combination."""
        algorithm, further = ALGORITHMS[case.algorithm]
        options = {**further, **({"teacher": self._teacher} if algorithm == "opd" else {})}
        rollout, optimize = self._template.rollout, self._template.optimize
        chosen = {
            "sampler": _component(rollout.sampler, *SAMPLERS[case.sampler]),
            "plan": _component(rollout.plan, *PLANS[case.plan]),
            "same_noise": algorithm == "fdfo",
        }
        return self._template.model_copy(
            update={
                "rollout": rollout.model_copy(update=chosen),
                "optimize": optimize.model_copy(
                    update={"algorithm": _component(optimize.algorithm, algorithm, options)}
                ),
                "advantage": self._advantages[case.advantage],
            }
        )

    def refusal(self, case: Case) -> str | None:
        """Return why check refuses a combination, None if it does not."""
        try:
            check_config(self.config(case), rewards=False)
        except ConfigError as error:
            return str(error)
        return None

    def train(self, case: Case) -> list[str]:
        """Carry out the first update of a combination; return what is wrong with it."""
        config = self.config(case)
        context, live = self._advantage(case, config)
        stage = make_stage(context, "optimize", 1)
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            output = stage.run(Shard("policy"), Path(name))
            after = load_file(Path(name) / Weights.TRAINED.value)
        (update,) = output.summary["updates"] or [None]
        changed = any(not torch.equal(value, self._before[key]) for key, value in after.items())
        expected = live or not make_algorithm(config).requires.advantages
        return list(_faults(config.optimize.algorithm.name, update, changed=changed, expected=expected))

    def _advantage(self, case: Case, config: RunConfig) -> tuple[RunContext, bool]:
        """Return the context with this combination's advantages current, and whether one is not 0."""
        context, name = self._rollout(case, config)
        context.config, context.plan = config, RunPlan(config)
        if self._current.get(name) != case.advantage:
            # What counts of the run is what its config asks for, and that is another one now.
            context.chain = Chain(context)
            stage = stage_run(context, "advantage", 1)
            stage.execute()
            values = read_rows(context.store, stage.ref).column("advantage").to_numpy()
            self._live[name, case.advantage] = bool((values != 0).any())
            self._current[name] = case.advantage
        return context, self._live[name, case.advantage]

    def _rollout(self, case: Case, config: RunConfig) -> tuple[RunContext, str]:
        """Return a run with this combination's rollouts, scored, and its name."""
        means, penalty = make_algorithm(config).requires.old_means, config.advantage.kl_coef > 0
        name = (
            f"{case.sampler}-{case.plan}-{means}-{penalty}-{config.rollout.same_noise}-{RunPlan(config).has_gradients}"
        )
        if name not in self._contexts:
            self._contexts[name] = self._fresh(config, len(self._contexts))
        return self._contexts[name], name

    def _fresh(self, config: RunConfig, number: int) -> RunContext:
        run = config.run.model_copy(update={"name": f"run-{number}"})
        context = begin_run(config.model_copy(update={"run": run}))
        session_of(context).host._trainable = self._held
        for name in ("base", "encode", "preprocess", "policy"):
            run_stage(context, name, 0)
        if self._held is None:
            self._held = session_of(context).host.trainable(context.policy_ref(0))
            self._before = {name: value.clone() for name, value in self._held.state().items()}
            session_of(context).host.give_teacher(self._held, self._teacher)
        session_of(context).host.trainable(context.policy_ref(0))
        run_stage(context, "rollout", 1)
        for section in config.rewards:
            run_stage(context, "score", 1, section.slot)
        for node in RunPlan(config).gradients(1):
            run_stage(context, node.stage, 1, node.slot)
        return context


def _component(like: Any, name: str, options: Options) -> Any:
    return like.model_copy(update={"name": name, "options": dict(options)})


def _faults(algorithm: str, update: Mapping[str, float] | None, *, changed: bool, expected: bool) -> Iterator[str]:
    if changed != expected:
        yield f"parameters {'changed' if changed else 'did not change'}"
    if update is None:
        if expected:
            yield "no update"
        return
    if not all(math.isfinite(value) for value in update.values()):
        yield f"a figure is not finite: {update}"
    if expected and not update["grad_norm"] > 0:
        yield "the gradient is 0"
    # An update in which all advantages are 0 has no rows, and so no ratios.
    if expected and algorithm in RATIOS and (update["ratio_mean"], update["ratio_std"]) != (1.0, 0.0):
        yield f"the first ratios are {update['ratio_mean']} +- {update['ratio_std']}"
    if update.get("replay_gap_max", 0.0) > _ROUNDING:
        yield f"log-probs differ from the rollout's by {update['replay_gap_max']}"


@dataclass(slots=True)
class Tally:
    """The results of combinations."""

    refused: Counter[str]
    """Messages by shape: names and numbers left out."""
    examples: dict[str, str]
    """One whole message of each shape."""
    trained: int
    """Combinations with a correct update."""
    wrong: dict[Case, list[str]]
    """Combinations that were neither."""
    pairs: set[frozenset[tuple[str, Any]]]
    """Pairs of settings that were trained together."""


def run(bench: Bench, cases: Iterable[Case], report: Any = None) -> Tally:
    """Try combinations, one after the other."""
    tally = Tally(Counter(), {}, 0, {}, set())
    for number, case in enumerate(cases):
        refusal = bench.refusal(case)
        if refusal is not None:
            tally.refused[shape(refusal)] += 1
            tally.examples.setdefault(shape(refusal), refusal)
        elif faults := bench.train(case):
            tally.wrong[case] = faults
        else:
            tally.trained += 1
            tally.pairs |= case.pairs
        if report is not None and number % 1000 == 0:
            report(number, tally)
    return tally


def shape(message: str) -> str:
    """Return a message without its names and numbers, to count reasons with."""
    return re.sub(r"\[[\d, ]+\]|\b\d[\d.e-]*\b|'[^']*'", "…", message)


def make_models(folder: Path) -> tuple[Path, Path]:
    """Write the smallest Stable Diffusion 3 that is one, and a teacher with other weights."""
    for seed, name in enumerate(("base", "teacher")):
        pipeline = tiny_pipeline(seed)
        config = {**pipeline.transformer.config, "num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 16}
        torch.manual_seed(seed)
        pipeline.transformer = SD3Transformer2DModel.from_config({**config, "caption_projection_dim": 16})
        pipeline.save_pretrained(folder / name)
    return folder / "base", folder / "teacher"


def main() -> None:
    """Try all combinations and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--some", action="store_true", help="only those that the test suite tries")
    parser.add_argument("--part", default="0/1", help="2/4: the third of four parts, to run them side by side")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flowmill-combinations-") as name:
        bench = Bench(*make_models(Path(name)), Path(name))
        tally = run(bench, some_cases() if options.some else every_case(part, parts), _report)
    total = tally.trained + sum(tally.refused.values()) + len(tally.wrong)
    lines = [f"{total} combinations: {tally.trained} trained, {sum(tally.refused.values())} refused, "]
    lines[0] += f"{len(tally.wrong)} wrong; {time.monotonic() - started:.0f} s"
    lines += [f"{count:7d}  {tally.examples[reason]}" for reason, count in tally.refused.most_common()]
    lines += [f"WRONG {case}: {'; '.join(faults)}" for case, faults in list(tally.wrong.items())[:50]]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(bool(tally.wrong))


def _report(number: int, tally: Tally) -> None:
    sys.stderr.write(f"{number}: {tally.trained} trained, {len(tally.wrong)} wrong\n")


if __name__ == "__main__":
    main()
