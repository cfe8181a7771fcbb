"""Samplers of prompts: what each chooses by hand, and a run whose choice depends on committed rewards alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.choices.base import Candidate, Choice, Draw
from flowmill.tasks.choices.informative import Informative
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.runs.seeds import epoch_prompts
from tests.support.inside import Make, prepare, run_epoch, run_stage, stage_rows


def of(*known: tuple[int, float, float] | None, sources: Sequence[str] = (), streak: int = 1) -> list[Candidate]:
    """Return candidates by last epoch, mean and spread; None: never drawn."""
    names = sources or [""] * len(known)
    return [
        Candidate(id=str(number), source=source)
        if each is None
        else Candidate(
            id=str(number), source=source, drawn=each[0], scored=each[0], mean=each[1], spread=each[2], streak=streak
        )
        for number, (each, source) in enumerate(zip(known, names, strict=True))
    ]


def choose(name: str, candidates: list[Candidate], count: int, epoch: int = 9, **options: Any) -> list[Choice]:
    further = {key: options.pop(key) for key in ("weights", "means") if key in options}
    draw = Draw(candidates=candidates, count=count, seed=0, epoch=epoch, **further)
    made = create(SAMPLERS, name, options, label="prompts.sampler")
    found = list(made.choose(draw))
    assert found == list(made.choose(draw))
    assert len({choice.place for choice in found}) == count
    return found


def indices(found: Sequence[Choice]) -> list[int]:
    return [choice.place for choice in found]


def test_permutations_are_those_of_runs_without_a_sampler() -> None:
    assert indices(choose("permutation", of(*[None] * 7), 3, epoch=2)) == epoch_prompts(7, 3, seed=0, epoch=2)


def test_difficulty_around_a_target() -> None:
    known = [(3, 0.0, 0.0), (2, 0.5, 0.5), (1, 0.4, 0.1), (4, 0.9, 0.2), (5, 1.0, 0.0), None, None, None]
    found = choose("difficulty", of(*known), 4, target=0.5, pools=2, fresh=0.25)
    # One of four is new; the first pool holds the two means nearest to the target, the one drawn earlier first.
    assert found[0].reason == "no rewards known"
    assert indices(found[1:]) == [2, 1, 3]
    assert found[2].reason == "mean 0.5 and spread 0.5 in epoch 2, pool 1"
    # Groups of equal rewards come last, and new prompts fill up what known ones leave.
    assert indices(choose("difficulty", of(*known), 6, target=0.5, fresh=0.0))[1:] == [1, 2, 3, 0, 4]
    assert sorted(indices(choose("difficulty", of(*known[:1], None, None), 3, target=0.5))) == [0, 1, 2]


@pytest.mark.parametrize(("epoch", "expected"), [(1, {2, 0}), (5, {1, 4}), (9, {3, 5}), (99, {3, 5})])
def test_difficulty_from_easy_to_hard(epoch: int, expected: set[int]) -> None:
    known = [(1, 0.9, 0.1), (1, 0.6, 0.1), (1, 1.0, 0.0), (1, 0.1, 0.1), (1, 0.5, 0.1), (1, 0.0, 0.0)]
    assert set(indices(choose("difficulty", of(*known), 2, epoch, epochs=12, pools=3))) == expected


@pytest.mark.parametrize(("epoch", "expected"), [(1, {1, 4}), (5, {0, 3}), (9, {2, 5}), (99, {2, 5})])
def test_difficulty_by_given_levels(epoch: int, expected: set[int]) -> None:
    levels: list[Any] = [2, 1, 3.5, "2", 0, "3"]
    prompts = [Candidate(id=str(number), metadata={"terms": each}) for number, each in enumerate(levels)]
    found = choose("difficulty", prompts, 2, epoch, epochs=12, pools=3, level="terms")
    assert set(indices(found)) == expected
    if epoch == 1:
        assert {choice.reason for choice in found} == {"terms 1, pool 1", "terms 0, pool 1"}


@pytest.mark.parametrize("level", [None, True, "many", "nan", [1]])
def test_levels_that_are_no_numbers_are_refused(level: Any, make_config: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}", "level": n} for n in range(8)]
    sampler = "prompts.sampler={name: difficulty, options: {epochs: 4, level: level}}"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(f"prompts.train={tmp_path / 'rows.jsonl'}", sampler)
    check_config(config, rewards=False)
    rows[3]["level"] = level
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="by 'level', but of the prompt 'number 3' its column 'level' is"):
        check_config(config, rewards=False)


def test_informative_leaves_out_what_is_solved_and_brings_it_back() -> None:
    known = [(7, 1.0, 0.0), (6, 0.5, 0.5), (1, 1.0, 0.0), (8, 0.0, 0.0), None]
    found = choose("informative", of(*known, streak=2), 4, again=8)
    assert [(choice.place, choice.reason) for choice in found] == [
        (4, "not drawn before"),
        (2, "drawn last in epoch 1, solved: a check"),
        (1, "drawn last in epoch 6"),
        (3, "drawn last in epoch 8"),
    ]
    assert choose("informative", of(*known, streak=2), 5)[4].reason == "drawn last in epoch 7, solved: too few others"
    assert indices(choose("informative", of(*known, streak=1), 4)) == [4, 2, 1, 0]
    assert indices(choose("informative", of(*known, streak=2), 4, solved=1.1)) == [4, 2, 1, 0]
    stored = Informative(solved=0.7)._is_solved
    assert stored(Candidate(id="a", mean=float(np.float32(0.7)), streak=2))


def shares(found: Sequence[Choice], sources: Sequence[str]) -> Mapping[str, int]:
    return {name: sum(sources[choice.place] == name for choice in found) for name in dict.fromkeys(sources)}


def test_sources_follow_their_progress() -> None:
    sources, weights = ["a", "b"] * 50, {"a": 1.0, "b": 1.0}
    candidates = of(*[None] * 100, sources=sources)
    means = {"a": [0.1, 0.1, 0.5, 0.5], "b": [0.3, 0.3, 0.3, 0.3]}
    moving = choose("sources", candidates, 24, weights=weights, means=means, window=2, floor=0.2)
    assert shares(moving, sources) == {"a": 20, "b": 4}
    assert shares(choose("sources", candidates, 24, weights=weights, means=means, window=3), sources)["a"] == 12
    fixed = choose("sources", candidates, 24, weights={"a": 3.0, "b": 1.0}, means=means, window=2, follow="weights")
    assert shares(fixed, sources) == {"a": 18, "b": 6}
    # A source that has too few gives all it has.
    few = of(*[None] * 30, sources=["a"] * 5 + ["b"] * 25)
    assert shares(choose("sources", few, 24, weights=weights, means=means, window=2), ["a"] * 5 + ["b"] * 25)["a"] == 5


@pytest.mark.parametrize("name", ["difficulty", "informative"])
def test_choices_within_sources_keep_the_configured_shares(name: str) -> None:
    sources = ["a", "b"] * 10
    known = [(1 + number % 3, number / 20, 0.1) for number in range(20)]
    options = {"target": 0.5} if name == "difficulty" else {}
    found = choose(name, of(*known, sources=sources), 8, weights={"a": 3.0, "b": 1.0}, **options)
    assert shares(found, sources) == {"a": 6, "b": 2}


SAMPLER = "prompts.sampler={name: difficulty, options: {target: -1.0, fresh: 0.5}}"


def epochs_of(context: RunContext, count: int) -> None:
    for epoch in range(1, count + 1):
        run_epoch(context, epoch)


def known_in(context: RunContext, epoch: int) -> set[int]:
    ref = context.chain.require(epoch, "choose").ref
    return set(read_rows(context.store, ref, "prompt_states").column("scored").to_pylist())


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_chooses_from_committed_rewards_alone(make_config: Make, tmp_path: Path, ahead: int) -> None:
    three = [SAMPLER, "run.epochs=3", f"execution.ahead={ahead}"]
    whole = prepare(make_config(f"store.root={tmp_path / 'whole'}", *three))
    epochs_of(whole, 3)
    for epoch in (1, 2, 3):
        manifest = whole.store.require(whole.chain.require(epoch, "choose").ref)
        assert len(manifest.inputs) == 1 + (epoch > 1) + (epoch - 1 - ahead > 0)
        table = stage_rows(whole, epoch, "choose")
        rolled = whole.store.require(whole.chain.require(epoch, "rollout").ref)
        assert str(whole.chain.require(epoch, "choose").ref) in rolled.inputs
        rewards = stage_rows(whole, epoch, "advantage")
        assert rewards.column("prompt_id").to_pylist()[::4] == table.column("prompt_id").to_pylist()
    assert known_in(whole, 3) <= set(range(3 - ahead))
    assert any("mean" in reason for reason in table.column("reason").to_pylist())
    states = read_rows(whole.store, whole.chain.require(3, "choose").ref, "prompt_states").to_pylist()
    newest = next(row for row in states if row["scored"] == 2 - ahead)
    rewards = stage_rows(whole, 2 - ahead, "advantage").to_pylist()
    own = [row["reward"] for row in rewards if row["prompt_id"] == newest["prompt_id"]]
    assert newest["mean"] == pytest.approx(fmean(own))
    # Another process goes on after each stage.
    context = prepare(make_config(*three))
    for epoch in (1, 2, 3):
        for node in (*context.plan.scored(epoch), *context.plan.training(epoch)):
            again = open_run(context.store.root.uri, "small")
            run_stage(again, node.stage, epoch, node.slot)
    assert open_run(context.store.root.uri, "small").chain.digest() == whole.chain.digest()


class Greedy:
    """Takes the first prompt again and again."""

    def choose(self, draw: Draw) -> list[tuple[int, str]]:
        return [(0, "first")] * draw.count


def test_a_sampler_of_ones_own_that_repeats_itself_is_told(make_config: Make) -> None:
    context = prepare(make_config(f"prompts.sampler={__name__}:Greedy"))
    with pytest.raises(ConfigError, match="chose 4 prompts for epoch 1, 1 of them different; it must choose 4"):
        run_epoch(context, 1)
