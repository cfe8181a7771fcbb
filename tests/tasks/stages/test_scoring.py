"""The scoring stage: what a reward is handed, what becomes of samples it cannot score, and how scores are composed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.schema import RunConfig
from flowmill.flows.cli.status_tables import last_figures
from flowmill.models.rewards.base import Batch, Needs, Scores
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from flowmill.models.rewards.wrappers import mean_ranks
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.advantages.groups import composed, groups_within
from flowmill.tasks.metrics.alerts import alerts
from flowmill.tasks.metrics.best import best_of
from flowmill.tasks.metrics.describe import describe_result, describe_run, describe_stage
from flowmill.tasks.metrics.evaluations import evaluation_figures, weighted_reward, weighted_rewards
from flowmill.tasks.metrics.monitors import correlations, shares
from flowmill.tasks.metrics.sweep import Variant, outcome
from flowmill.tasks.metrics.tracked import evaluation_content, paragraphs
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage_run import StageRun
from tests.conftest import FlowmillCommand
from tests.support.clip import write_latent_head
from tests.support.inside import Make, evaluate, make_stage, prepare, run_epoch, run_stage, session_of, stage_run
from tests.support.serving import served, spoiling

PICKY, GROUPED, LATENT = (f"tests.tasks.stages.test_scoring:{name}" for name in ("picky", "Grouped", "Latent"))


def picky(
    media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], bad: Sequence[str] = ()
) -> np.ndarray:
    """Brightness; raises for some prompts."""
    for prompt in prompts:
        if prompt in bad:
            raise KeyError(prompt)
    return np.asarray(media.reshape(len(media), -1).mean(1))


class Grouped:
    """The rank of brightness; wants whole groups of 4."""

    needs = Needs(groupwise=True)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        assert len(prompts) in (1, 2, 4)
        assert len(set(prompts)) == 1
        return mean_ranks(media.reshape(len(media), -1).mean(1))


class Latent:
    """The first number of the latents."""

    needs = Needs(media="latents")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        assert media.dtype == np.float32
        return np.asarray(media.reshape(len(media), -1)[:, 0])


def made(context: RunContext, name: str, slot: str = "") -> ArtifactRef:
    entry = context.chain.find(1, name, slot)
    assert entry is not None
    return entry.ref


def rewards_of(context: RunContext, slot: str) -> pa.Table:
    return read_rows(context.store, made(context, "score", slot))


def advantages_of(context: RunContext) -> dict[str, Any]:
    return read_rows(context.store, made(context, "advantage")).to_pydict()  # type: ignore[no-any-return]


def excluding(policy: str, *bad: str) -> str:
    options = "{bad: [" + ", ".join(f"'{prompt}'" for prompt in bad) + "]}"
    return f"rewards=[{{name: '{PICKY}', label: mine, on_failure: {policy}, options: {options}}}]"


def prompts_of(context: RunContext) -> list[str]:
    table = read_rows(context.store, made(context, "score", "mine"))
    by_id = context.prompts_by_id
    return [by_id[prompt].text for prompt in table.column("prompt_id").to_pylist()]


def test_samples_that_fail_are_left_out_and_say_why(make_config: Make) -> None:
    first = prepare(make_config(excluding("exclude_sample")))
    run_epoch(first, 1)
    chosen = prompts_of(first)[0]
    context = prepare(make_config(excluding("exclude_sample", chosen), "run.name=left-out"))
    run_epoch(context, 1)
    table = rewards_of(context, "mine").to_pydict()
    failed = [value is None for value in table["reward"]]
    assert failed == [prompt == chosen for prompt in prompts_of(context)]
    assert sum(failed) == 4
    assert all(
        note == (f"failed: KeyError: '{chosen}'" if lost else "")
        for note, lost in zip(table["note"], failed, strict=True)
    )
    whole = rewards_of(first, "mine").to_pydict()["reward"]
    assert [a for a, lost in zip(table["reward"], failed, strict=True) if not lost] == [
        a for a, lost in zip(whole, failed, strict=True) if not lost
    ]
    found = advantages_of(context)
    assert [value is None for value in found["advantage"]] == failed
    summary = context.store.require(made(context, "advantage")).summary
    assert (summary["excluded_samples"], summary["excluded_groups"]) == (4, 1)
    assert context.store.require(made(context, "score", "mine")).summary["failed"] == 4
    updates = context.store.require(made(context, "optimize")).summary["updates"]
    assert sum(update["rows"] for update in updates) == 12 * 2
    # What is left out does not touch the others: their advantages are those of a run in which nothing failed.
    kept = {s: a for s, a in zip(found["sample_id"], found["advantage"], strict=True) if a is not None}
    before = dict(zip(advantages_of(first)["sample_id"], advantages_of(first)["advantage"], strict=True))
    assert kept == {sample: before[sample] for sample in kept}


def thirds(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Brightness, nan for a third of all images."""
    sums = media.reshape(len(media), -1).sum(1, dtype=np.int64)
    return np.where(sums % 3 == 0, np.nan, sums / media[0].size)


def test_a_failed_sample_takes_its_group_along_where_that_is_wanted(make_config: Make) -> None:
    found = {}
    for policy in ("exclude_sample", "exclude_group"):
        reward = f"{{name: 'tests.tasks.stages.test_scoring:thirds', label: mine, on_failure: {policy}}}"
        context = prepare(make_config(f"rewards=[{reward}]", f"run.name={policy.replace('_', '-')}"))
        run_epoch(context, 1)
        found[policy] = advantages_of(context)
    failed = [value is None for value in rewards_of(context, "mine").column("reward").to_pylist()]
    groups = found["exclude_sample"]["group_id"]
    hit = {group for group, lost in zip(groups, failed, strict=True) if lost}
    assert 0 < len(hit) < 4, "some groups are whole, or the test shows nothing"
    assert [value is None for value in found["exclude_sample"]["advantage"]] == failed
    assert [value is None for value in found["exclude_group"]["advantage"]] == [group in hit for group in groups]
    for columns in found.values():
        for group in set(groups):
            kept = [a for a, g in zip(columns["advantage"], groups, strict=True) if g == group and a is not None]
            assert math.isclose(sum(kept), 0.0, abs_tol=1e-5), "a partial group is centered as what it is"


@pytest.mark.parametrize("size", [1, 2])
def test_a_failure_of_all_samples_stops_before_training_whatever_the_policy(make_config: Make, size: int) -> None:
    every = [f'"{number:02d}"' for number in range(8)]
    context = prepare(make_config(excluding("exclude_group", *every), f"rollout.groups_per_shard={size}"))
    for stage, slot in (("rollout", ""), ("score", "mine")):
        run_stage(context, stage, 1, slot)
    assert context.store.require(made(context, "score", "mine")).summary == {"failed": 16}
    with pytest.raises(RewardError, match=r"every sample of epoch 1 is left out.*stage score --run small --epoch 1"):
        run_stage(context, "advantage", 1)


@pytest.mark.parametrize("lists", [["heldout"], ["heldout", "train"]])
def test_every_reader_takes_evaluations_of_which_all_samples_failed(make_config: Make, lists: list[str]) -> None:
    prompts = RunPlan(make_config()).prompts
    bad = [prompt.text for split in lists for prompt in prompts[split]]
    context = prepare(make_config(excluding("exclude_sample", *bad), "run.epochs=1"))
    evaluate(context, 0)
    if lists == ["heldout"]:
        run_epoch(context, 1)
        evaluate(context, 1)
    chain, figures = context.chain, evaluation_figures(context.chain, 0)
    assert [set(figures[split]["mine"]) for split in lists] == [{"failed"}] * len(lists)
    assert set(weighted_rewards(context.config, figures)) == {"train", "heldout"} - set(lists)
    assert weighted_reward(context.config, figures) is None
    best = best_of(context.config, RunView(context).evaluations)
    assert (best is None) == ("train" in lists)
    content = evaluation_content(chain, 0)
    assert content is not None
    assert content.reward is None
    assert {point.key for point in content.points} >= {f"eval/{split}/mine_failed" for split in lists}
    node = Node(0, "judge", "mine")
    assert set(describe_stage(context, node, chain.ref(node)).means) == {"train", "heldout"} - set(lists)
    assert not any("held-out" in line for line in paragraphs(context, done=True)[1:])
    assert alerts(chain) == []
    assert outcome(context, Variant(name="small", settings={}), context.config).reward is None
    assert describe_run(context)["evaluations"]["0"] == describe_result(context)["evaluations"]["0"] == figures
    assert "mine" in run_report(context, context)
    assert f"{lists[-1]} mine failed" in last_figures(describe_run(context))


def test_a_shard_of_one_bad_prompt_stops_nothing(make_config: Make) -> None:
    bad = make_stage(prepare(make_config(excluding("stop"))), "rollout", 1).groups[1].text
    context = prepare(make_config(excluding("exclude_sample", bad), "rollout.groups_per_shard=1", "run.name=one"))
    run_epoch(context, 1)
    assert context.store.require(made(context, "advantage")).summary["excluded_groups"] == 1


def test_answers_that_are_no_scores_stop_whatever_the_policy() -> None:
    class Short:
        def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
            return [1.0]

    batch = Batch(media=np.zeros((3, 2, 2, 3), np.uint8), prompts=["a"] * 3, metadata=[{}] * 3)
    with pytest.raises(RewardError, match=r"returned a list of 1, which begins with 1.0 for"):
        score(Short(), "short", batch, Handling(exclude=True))
    with pytest.raises(ConnectionError):
        score(Lost(), "lost", batch, Handling(exclude=True))


class Lost:
    """Has no connection."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
        raise ConnectionError("gone")


class Sometimes:
    """1 for every sample but those of some values: nan, an exception, a missing file."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
        for value in media[:, 0, 0, 0]:
            if value == 1:
                raise ZeroDivisionError("one")
            if value == 2:
                raise FileNotFoundError(2, "no such file", "two.png")
        return [math.nan if value == 3 else float(value) for value in media[:, 0, 0, 0]]


@pytest.mark.parametrize("batch_size", [None, 1, 2, 4])
def test_each_sample_that_fails_is_found(batch_size: int | None) -> None:
    media = np.array([9, 1, 8, 2, 3, 7], np.uint8)[:, None, None, None].repeat(3, -1)
    batch = Batch(media=media, prompts=list("abcdef"), metadata=[{}] * 6)
    found = score(Sometimes(), "sometimes", batch, Handling(exclude=True, batch_size=batch_size))
    np.testing.assert_array_equal(found.values, np.array([9, np.nan, 8, np.nan, np.nan, 7], np.float32))
    notes = list(found.notes or [])
    assert notes[1] == "failed: ZeroDivisionError: one"
    assert notes[3].startswith("failed: FileNotFoundError: [Errno 2] no such file")
    assert "returned nan for prompt 'e'" in notes[4]
    assert [notes[row] for row in (0, 2, 5)] == [""] * 3


class Noted:
    """Remarks and failures with the text of an object."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> Scores:
        if "b" in prompts:
            raise KeyError(object())
        return Scores(np.ones(len(media), np.float32), [str(object()) for _ in prompts])


def test_remarks_and_reasons_of_exclusions_have_no_addresses() -> None:
    batch = Batch(media=np.zeros((3, 2, 2, 3), np.uint8), prompts=list("abc"), metadata=[{}] * 3)
    found = score(Noted(), "noted", batch, Handling(exclude=True))
    assert list(found.notes or []) == ["<object object>", "failed: KeyError: <object object>", "<object object>"]


def test_a_stopped_run_goes_on_when_failures_are_excluded(make_config: Make) -> None:
    wide = "rollout.prompts_per_epoch=8"
    bad = make_stage(prepare(make_config(excluding("stop"), wide)), "rollout", 1).groups[-1].text
    context = prepare(make_config(excluding("stop", bad), wide, "run.name=fails"))
    run_stage(context, "rollout", 1)
    with pytest.raises(RewardError, match=f"failed for prompt '{bad}'"):
        run_stage(context, "score", 1, "mine")
    assert len(context.store.committed(make_stage(context, "score", 1, "mine").ref)) == 3, "the others are kept"
    context = prepare(make_config(excluding("exclude_group", bad), wide, "run.name=fails"))
    for name, slot in (("score", "mine"), ("advantage", ""), ("optimize", "")):
        run_stage(context, name, 1, slot)
    assert context.store.require(made(context, "advantage")).summary["excluded_groups"] == 1
    # With the stricter policy the same scores are an error again, where they become advantages.
    strict = prepare(make_config(excluding("stop", bad), wide, "run.name=fails"))
    with pytest.raises(RewardError, match=r"'mine' failed for 4 samples of epoch 1, .* on_failure is 'stop'"):
        run_stage(strict, "advantage", 1)


def test_a_groupwise_reward_sees_one_prompt_at_a_time(make_config: Make) -> None:
    rewards = f"rewards=[{{name: '{GROUPED}', label: g}}, {{name: rank, options: {{reward: jpeg_compressibility}}}}]"
    context = prepare(make_config(rewards, "rollout.groups_per_shard=3"))
    run_epoch(context, 1)
    evaluate(context, 1)
    for slot, best in (("g", 4), ("rank", 1)):
        table = rewards_of(context, slot).to_pydict()
        for group in set(table["group_id"]):
            found = [r for r, g in zip(table["reward"], table["group_id"], strict=True) if g == group]
            # Ranks of four add up to ten, whatever is tied; they would not across groups.
            assert sum(found) == pytest.approx(10 * best / 4)
            assert max(found) <= best


def test_equal_samples_share_the_mean_of_their_ranks() -> None:
    np.testing.assert_array_equal(mean_ranks(np.array([3.0, 1.0, 3.0, 2.0])), [3.5, 1.0, 3.5, 2.0])
    rank = make_reward("rank", {"reward": "jpeg_incompressibility"})
    media = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    media[2] = 0
    batch = Batch(media=media, prompts=[""] * 4, metadata=[{}] * 4, groups=["a"] * 4)
    assert score(rank, "rank", batch).values[2] == 0.25


def test_latents_are_scored_without_any_decoder(make_config: Make) -> None:
    rewards, parquet = f"rewards=[{{name: '{LATENT}', label: l}}]", "rollout.store=parquet"
    context = prepare(make_config(rewards, "rollout.media={format: none, latents: true}", parquet))
    run_epoch(context, 1)
    evaluate(context, 1)
    assert session_of(context).host.loads["vae"] == 0
    assert session_of(context).host.loads["denoiser"] == 1
    with_images = prepare(make_config("rollout.media.latents=true", rewards, "run.name=decoded", parquet))
    run_epoch(with_images, 1)
    assert session_of(with_images).host.loads["vae"] == 1
    assert rewards_of(context, "l") == rewards_of(with_images, "l"), "the same latents, whether decoded or not"
    assert advantages_of(context) == advantages_of(with_images)


def test_a_head_of_ones_own_scores_latents(make_config: Make, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"0.weight": torch.ones(1, 4 * 8 * 16), "0.bias": torch.zeros(1)}, tmp_path / "sum.safetensors")
    head = f"{{name: latent_head, options: {{head: '{tmp_path / 'sum.safetensors'}'}}}}"
    context = prepare(make_config(f"rewards=[{head}]", "rollout.media={format: none, latents: true}"))
    run_epoch(context, 1)
    assert all(math.isfinite(value) for value in rewards_of(context, "latent_head").column("reward").to_pylist())
    write_latent_head(tmp_path / "conv.safetensors")
    reward = make_reward("latent_head", {"head": str(tmp_path / "conv.safetensors")})
    latents = np.random.default_rng(0).standard_normal((3, 4, 8, 8), np.float32)
    assert score(reward, "head", Batch(media=latents, prompts=[""] * 3, metadata=[{}] * 3)).values.shape == (3,)
    save_file({"0.weight": torch.ones(2, 8)}, tmp_path / "two.safetensors")
    for name, said in (("two", "the last with one output"), ("nowhere", "No such file")):
        with pytest.raises(ConfigError, match=said):
            make_reward("latent_head", {"head": str(tmp_path / f"{name}.safetensors")})


class OfClips(Latent):
    needs = Needs(media="clips")


class Columned(Latent):
    needs = Needs(columns=("count",))


def test_scores_are_composed_by_hand() -> None:
    values = torch.tensor([1.0, 3.0, float("nan"), 5.0])
    torch.testing.assert_close(composed(values, threshold=3.0), torch.tensor([0.0, 1.0, math.nan, 1.0]).double(),
                               equal_nan=True)  # fmt: skip
    std = math.sqrt(8 / 3)
    expected = torch.tensor([-2 / std, 0.0, math.nan, 2 / std], dtype=torch.float64)
    torch.testing.assert_close(composed(values, standardize=True), expected, equal_nan=True)
    assert composed(torch.ones(3), standardize=True).tolist() == [0.0, 0.0, 0.0]
    assert composed(values).tolist()[:2] == [1.0, 3.0]
    # Scores are stored as float32, in which 0.7 is below 0.7.
    for threshold in (0.6, 0.7, 0.9):
        assert composed(torch.tensor([threshold]).float().double(), threshold=threshold).tolist() == [1.0]
        same = torch.tensor([threshold, threshold])
        assert groups_within(same, torch.zeros(2, dtype=torch.int64), low=threshold, high=threshold).all()


def test_composition_belongs_to_the_advantages_alone(make_config: Make) -> None:
    rewards = "rewards=[{{name: jpeg_compressibility{0}}}, {{name: digits, weight: 0.5}}]"
    plain = prepare(make_config(rewards.format("")))
    run_epoch(plain, 1)
    for number, more in enumerate((", threshold: -1.0", ", standardize: true", ", weight: 2.0")):
        context = prepare(make_config(rewards.format(more), f"run.name=other-{number}"))
        assert make_stage(context, "rollout", 1).ref == make_stage(plain, "rollout", 1).ref
        stage_run(context, "rollout", 1).finish()
        for slot in ("jpeg_compressibility", "digits"):
            run = stage_run(context, "score", 1, slot)
            assert not run.pending(), "found, not scored again"
            run.finish()
        stage = make_stage(context, "advantage", 1)
        assert stage.ref != made(plain, "advantage")
        StageRun(stage).execute()
        parts = shares(context.chain, 1)
        assert sum(parts.values()) == pytest.approx(1.0)


def test_monitors_may_fail_for_some(make_config: Make) -> None:
    context = prepare(make_config(excluding("exclude_sample").replace("rewards", "monitors")))
    run_epoch(context, 1)
    run_stage(context, "score", 1, "mine")
    failing = prompts_of(context)[0]
    context = prepare(make_config(excluding("exclude_sample", failing).replace("rewards", "monitors")))
    run_stage(context, "score", 1, "mine")
    assert rewards_of(context, "mine").column("reward").null_count == 4
    assert -1.0 <= correlations(context.chain, 1)["mine"] <= 1.0


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_two_runs_score_against_a_server_that_dies_lies_and_dawdles(
    make_config: Make, config_file: Path, tmp_path: Path, flowmill: FlowmillCommand
) -> None:
    """Both complete, and their scores are those of the reward scored here."""

    def spoil(number: int, body: bytes) -> bytes | None:
        if number % 5 == 1:
            return None
        if number % 5 == 2:
            return body[: len(body) // 2]
        if number % 5 == 3:
            time.sleep(1.0)
        return bytes(reversed(body)) if number % 5 == 4 else body

    local = ["--root", str(tmp_path / "local"), "--set", "rollout.groups_per_shard=1"]
    assert flowmill("run", str(config_file), *local).returncode == 0
    with served("jpeg_compressibility") as server, spoiling(server.url, spoil) as url:
        done: dict[str, int] = {}

        def run(name: str) -> None:
            about = f"rewards.0.server={{url: '{url}', timeout_s: 2, patience_s: 300}}"
            ended = flowmill("run", str(config_file), "--root", str(tmp_path / name),
                             "--set", about, "--set", "rollout.groups_per_shard=1")  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            done[name] = ended.returncode

        threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(4)
            server.kill()
            time.sleep(1)
            server.start()
        for thread in threads:
            thread.join()
    assert set(done) == {"one", "two"}
    scores = [
        _scores(make_config(f"store.root={tmp_path / name}", "rollout.groups_per_shard=1"))
        for name in ("local", "one", "two")
    ]
    assert scores[1] == scores[0]
    assert scores[2] == scores[0]


def _scores(config: RunConfig) -> list[dict[str, Any]]:
    from flowmill.tasks.runs.opening import begin_run

    context = begin_run(config)
    found = []
    for epoch in (1, 2):
        entry = context.chain.find(epoch, "score", "jpeg_compressibility")
        assert entry is not None
        found.append(read_rows(context.store, entry.ref).to_pydict())
    return found
