"""From comparisons alone to a better model: a simulated rater, a fitted reward, training on it, and the rater again.

python -m tools.taste digits|addition --seeds 0 1 2

The rater sees the page of ``flowmill rate``: two samples, blind, and their prompt. It prefers the one that a rule
prefers, and in one of ten comparisons gives another answer. Controls answer at random, or the opposite.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi.testclient import TestClient
from PIL import Image
from torch import nn
from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel, SiglipProcessor

from flowmill.configs.load import load_config
from flowmill.configs.reward_fit import FitConfig
from flowmill.models.quickstart.addition import AdditionBuilder
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.quickstart.text import clip_tokenizer
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from flowmill.tasks.export.provenance import accuracy_text
from flowmill.tasks.fitting.fit import fit_reward
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.ratings.answers import commit_preferences
from flowmill.tasks.ratings.app import make_app
from flowmill.tasks.ratings.figures import rating_report
from flowmill.tasks.ratings.groups import sources_of
from flowmill.tasks.ratings.request import RateRequest
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import evaluate, make_stage, prepare, run_epoch

#: The objective of a policy: the rule itself, or a reward fitted on comparisons of pairs at random, or half of them
#: chosen actively, or of the controls.
KINDS = ("rule", "random", "active", "inverted", "coin")
_NOISE, _EPOCH, _CLIP_UPDATES, _AGAIN = 0.1, 1, 1200, 100
_OPPOSITE = {"left": "right", "right": "left", "tie": "tie"}
Rater = Callable[[TestClient, dict[str, Any]], str]
"""Answers a pair that the page shows."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is rated, by which rule, and how its reward is fitted and used."""

    preset: str
    """Trains on the reward ``fitted``."""
    rule: str
    """The reward whose preferences the rater has; training on it is the goal."""
    judged: str
    """The reward, and the figure, that measure the results on held-out prompts."""
    sampled: tuple[str, ...]
    """Settings of the rollout that is rated."""
    backbone: str
    """The backbone of the reward."""
    model: Callable[[Path], str]
    """Writes the frozen model of the backbone into a folder, and returns it."""
    fit: dict[str, Any]
    """Settings of the fit."""
    pairs: int
    """Comparisons."""


def write_adder(folder: Path) -> str:
    """Write the base model of the task, trained on sums that are not held out until it adds well; return it."""
    if not folder.is_dir():
        AdditionBuilder(accuracy=0.9).build(folder, lambda label, done, total: None)
    return str(folder)


def write_clip(folder: Path) -> str:
    """Write a tiny SigLIP that is trained on real digits and their texts, as far as CLIP is on pictures; return it."""
    if folder.is_dir():
        return str(folder)
    tokenizer = clip_tokenizer()
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    texts = {**layers, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 8, "projection_size": 64}
    torch.manual_seed(0)
    model = SiglipModel(SiglipConfig(text_config=texts, vision_config={**layers, "image_size": 32, "patch_size": 8}))
    processor = SiglipProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer=tokenizer
    )
    labels, gray = digit_pairs(4096, seed=3)
    known = sorted(set(labels))
    wanted = torch.tensor([known.index(each) for each in labels])
    pictures = [np.repeat(each[..., None], 3, -1) for each in gray]
    pixels = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
    named = [f'"{each}"' for each in known]
    tokens = tokenizer(named, padding="max_length", truncation=True, max_length=8, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(_CLIP_UPDATES):
        rows = torch.randint(len(pixels), (128,))
        given = pixels[rows] + 0.2 * torch.randn(128, *pixels.shape[1:])
        seen, read = model.get_image_features(given).pooler_output, model.get_text_features(**tokens).pooler_output
        cosines = nn.functional.normalize(seen, dim=-1) @ nn.functional.normalize(read, dim=-1).T
        loss = nn.functional.cross_entropy(20 * cosines, wanted[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


TASKS = {
    "digits": Task(
        preset="digits_taste",
        rule="digits",
        judged="judge",
        sampled=("rollout.prompts_per_epoch=64", "rollout.group_size=24"),
        backbone="clip",
        model=write_clip,
        fit={"updates": 300, "learning_rate": 3e-3, "weight_decay": 3.0},
        pairs=600,
    ),
    "addition": Task(
        preset="addition_taste",
        rule="exact_text",
        judged="exact_text",
        sampled=("rollout.prompts_per_epoch=300",),
        backbone="likelihood",
        model=write_adder,
        fit={"updates": 300, "learning_rate": 3e-2, "weight_decay": 0.1},
        pairs=600,
    ),
}


def rater_of(kind: str, rule: str, seed: int) -> Rater:
    """Return a rater: ``true``, ``inverted`` (the opposite preference) or ``coin``."""
    reward, draw = make_reward(rule, {}), random.Random(f"{kind}-{seed}")

    def value(client: TestClient, prompt: str, side: dict[str, Any]) -> float:
        if side["text"] is not None:
            return float(side["text"] == str(sum(map(int, prompt.rstrip("=").split("+")))))
        pixels = np.asarray(Image.open(io.BytesIO(client.get(side["media"]).content), formats=["PNG"]).convert("RGB"))
        batch = Batch(media=pixels[None], prompts=[prompt], metadata=[{}])
        return float(score(reward, rule, batch, Handling()).values[0])

    def answer(client: TestClient, pair: dict[str, Any]) -> str:
        if kind == "coin":
            return draw.choice(["left", "right"])
        left, right = (value(client, pair["prompt"], sample) for sample in pair["samples"])
        choice = "tie" if left == right else "left" if left > right else "right"
        if draw.random() < _NOISE:
            choice = draw.choice([other for other in _OPPOSITE if other != choice])
        return _OPPOSITE[choice] if kind == "inverted" else choice

    return answer


def rate(context: RunContext, rater: Rater, request: RateRequest) -> None:
    """Answer the pairs of a page: of the rollout of an epoch, or of the first and the last evaluation."""
    sources = sources_of(context, None, request.epoch, evaluation=request.evaluation, scorer=request.scorer)
    with TestClient(make_app(context.run, sources, request, None)) as client:
        state = client.get("/api/group", params={"rater": request.rater}).json()
        while state["group"] is not None:
            choice = rater(client, state["group"])
            body = {"rater": state["rater"], "group": state["group"]["name"], "choice": choice, "seconds": 1.0}
            answered = client.post("/api/answer", json=body)
            answered.raise_for_status()
            state = answered.json()


class Study:
    """One task with one seed, in a store that keeps finished work."""

    def __init__(self, task: Task, root: Path, seed: int) -> None:
        self._task, self._root, self._seed = task, root, seed

    def context(self, name: str, rewards: str, *settings: str) -> RunContext:
        """Begin a run and make its base model."""
        given = [f"run.name={name}-{self._seed}", f"run.seed={self._seed}", f"store.root={self._root}/store"]
        return prepare(load_config(self._task.preset, [*given, f"rewards=[{rewards}]", *settings]))

    def fitted(self, name: str) -> str:
        """Return the setting of a fitted reward."""
        options = f"run: {name}-{self._seed}, model: {self._root / self._task.backbone}, unproven: true"
        return f"{{name: fitted, options: {{{options}}}}}"

    def judge(self, name: str, kind: str, pairs: int, scorer: str | None = None) -> str:
        """Have a rater compare samples of the base model; return the artifact of the preferences."""
        rewards = "{name: constant}" if scorer is None else self.fitted(scorer)
        context = self.context(f"rated-{name}", rewards, *self._task.sampled)
        for node in context.plan.scored(_EPOCH):
            StageRun(make_stage(context, node.stage, _EPOCH, node.slot)).execute()
        request = RateRequest(
            run=context.run.name, epoch=_EPOCH, pairs=pairs, seed=self._seed, scorer=scorer and "fitted", rater=kind
        )
        rate(context, rater_of(kind, self._task.rule, self._seed), request)
        return str(commit_preferences(context.run))

    def fit(self, name: str, preferences: Sequence[str]) -> str:
        """Fit a reward on preferences; return its accuracy."""
        name_of = self._task.backbone
        backbone = {"name": name_of, "options": {"model": self._task.model(self._root / name_of)}}
        store = {"root": str(self._root / "store")}
        config = {
            "name": f"{name}-{self._seed}",
            "data": preferences,
            "backbone": backbone,
            "store": store,
            **self._task.fit,
        }
        return accuracy_text(fit_reward(FitConfig.model_validate(config)).summary)

    def train(self, name: str, rewards: str) -> RunContext:
        """Train on a reward."""
        context = self.context(name, rewards)
        epochs = context.config.run.epochs
        for epoch in range(epochs + 1):
            if epoch:
                run_epoch(context, epoch)
            if epoch in (0, epochs):
                evaluate(context, epoch)
        return context

    def run(self, only: Sequence[str]) -> None:
        """Do everything, and print a line for each result."""
        for name in [name for name in KINDS if not only or name in only]:
            accuracy, half = "", self._task.pairs // 2
            if name == "active":
                first = self.judge("first", "true", half)
                self.fit("first", [first])
                accuracy = self.fit(name, [first, self.judge(name, "true", self._task.pairs - half, scorer="first")])
            elif name != "rule":
                accuracy = self.fit(name, [self.judge(name, "true" if name == "random" else name, self._task.pairs)])
            context = self.train(name, f"{{name: {self._task.rule}}}" if name == "rule" else self.fitted(name))
            found = [evaluation_figures(context.chain, epoch) for epoch in (0, context.config.run.epochs)]
            figures = [each["heldout"][self._task.judged] for each in found]
            scores = [f"{each[key]:.3f}" for each in figures for key in ("mean", "exact") if key in each]
            # Samples of the same noise, before and after.
            again = RateRequest(run=context.run.name, pairs=_AGAIN, rater="true")
            rate(context, rater_of("true", self._task.rule, self._seed), again)
            wins = rating_report(context)["wins"][0]
            line = " ".join([self._task.preset, str(self._seed), name, *scores, str(wins), accuracy])
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def main() -> None:
    """Run a study for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--root", type=Path, default=Path("taste-store"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--pairs", type=int, help="comparisons; with a root of its own")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[given.task]
    for seed in given.seeds:
        Study(replace(task, pairs=given.pairs or task.pairs), given.root.absolute(), seed).run(given.only)


if __name__ == "__main__":
    main()
