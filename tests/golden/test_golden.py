"""Advantages, schedules and rewards against numbers of the public implementations' own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.models.maths.schedules import AllSteps, Subset, Window
from flowmill.models.rewards import ocr
from flowmill.models.rewards.base import quoted_text
from flowmill.models.rewards.jpeg import JpegCompressibility
from flowmill.models.weights.ema import warm_decay
from flowmill.tasks.advantages.groups import (
    Normalizer,
    gdpo_advantages,
    group_advantages,
    group_statistics,
    running_advantages,
    shape_advantages,
)
from flowmill.tasks.algorithms.base import BehaviorDecay
from flowmill.tasks.runs.seeds import epoch_prompts
from tests.golden.vectors import Vectors, load

#: One process: what these tests read is looked back at by the last of them.
pytestmark = pytest.mark.xdist_group("golden")


def test_window_starts(golden_dir: Path) -> None:
    for case in load(golden_dir, "schedules.json")[0]["flowgrpo_fast_windows"]:
        first, stop = case["window_when_size0"]
        assert AllSteps().draw(case["num_steps"], 0, 1).trained == tuple(range(first, stop))
        if case["size"] == 0:
            continue
        low, high = case["range"]
        plan = Window(size=case["size"], low=low, high=high)
        drawn = {plan.draw(case["num_steps"], seed, 1).trained for seed in range(200)}
        assert sorted(window[0] for window in drawn) == case["allowed_starts"]
        noisy = {window[0]: [int(step in window) for step in range(case["num_steps"])] for window in drawn}
        assert noisy == {int(start): levels for start, levels in case["noise_level_for_start"].items()}


def test_drawn_steps(golden_dir: Path) -> None:
    """The trainers' draws differ from ours; what may be drawn does not."""
    for case in load(golden_dir, "schedules.json")[0]["ff_windows"]:
        candidates, count = case["sde_steps"], case["num_sde_steps"]
        # Its schedule has 10 steps.
        if count is None:
            assert list(AllSteps().draw(10, case["seed"], 1).trained) == case["current"]
            continue
        plan = Subset(count=count, candidates=candidates and tuple(candidates))
        drawn = {plan.draw(10, seed, 1).trained for seed in range(300)}
        assert tuple(sorted(case["current"])) in drawn
        possible = range(9) if candidates is None else candidates
        assert {step for steps in drawn for step in steps} == set(possible)


def test_an_epochs_prompts_are_distinct_and_repeated_for_the_whole_group(golden_dir: Path) -> None:
    for case in load(golden_dir, "schedules.json")[0]["krepeat_sampler"]:
        shared = [prompt for rank in case["per_rank"] for prompt in rank]
        assert len(shared) == case["world"] * case["batch_size"]
        prompts = len(shared) // case["k"]
        assert sorted(shared) == sorted([*set(shared)] * case["k"])
        ours = epoch_prompts(case["dataset_len"], prompts, seed=case["seed"], epoch=case["epoch"] + 1)
        assert len(set(ours)) == len(ours) == len(set(shared))
        assert set(ours) | set(shared) <= set(range(case["dataset_len"]))


def rewards_of(folder: Path) -> tuple[Vectors, torch.Tensor, torch.Tensor]:
    data, _ = load(folder, "advantages.npz")
    groups = torch.from_numpy(np.unique(data["group_id"], return_inverse=True)[1])
    return data, data.tensor("reward"), groups


@pytest.mark.parametrize(("std", "key"), [("group", 0), ("global", 1)])
def test_flow_grpo_advantages(golden_dir: Path, std: Any, key: int) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    ours = group_advantages(rewards, groups, Normalizer(std=std))
    expected = data[f"flowgrpo_globalstd{key}"]
    for column in range(expected.shape[1]):
        np.testing.assert_allclose(ours, expected[:, column], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(ours != 0, data[f"keep_mask_globalstd{key}"])
    per_step = data[f"flowgrpo_pertimestep_globalstd{key}"]
    for column in range(per_step.shape[1]):
        ours = group_advantages(torch.from_numpy(data["reward_t2"][:, column]), groups, Normalizer(std=std))
        np.testing.assert_allclose(ours, per_step[:, column], rtol=1e-6, atol=1e-9)


def test_best_and_worst_of_a_group(golden_dir: Path) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    ours = shape_advantages(rewards.double(), groups, mode="best_worst", clip=1e9)
    live = ~group_statistics(rewards, groups).constant[groups].numpy()
    # A group of equal rewards has no best: the public code gives its first sample +1 or -1 nevertheless.
    np.testing.assert_array_equal(ours.numpy()[live], data["flowgrpo_type_dpo"][live])
    np.testing.assert_array_equal((ours.numpy() > 0)[live], (data["flowgrpo_type_sft"] > 0)[live])
    np.testing.assert_allclose(rewards, data["flowgrpo_type_rwr"])


def test_ddpo_running_advantages(golden_dir: Path) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    options: Any = {"buffer": meta["ddpo_buffer"], "min_count": meta["ddpo_min_count"]}
    normalizer = Normalizer(epsilon=1e-6)
    nothing = [torch.zeros(0)] * (int(groups.max()) + 1)
    np.testing.assert_allclose(
        running_advantages(rewards, groups, nothing, normalizer, **options), data["ddpo_epoch1"], rtol=1e-5, atol=1e-6
    )
    history = [rewards[groups == group] for group in range(int(groups.max()) + 1)]
    second = running_advantages(torch.from_numpy(data["ddpo_reward2"]), groups, history, normalizer, **options)
    np.testing.assert_allclose(second, data["ddpo_epoch2"], rtol=1e-5, atol=1e-6)


def test_dance_advantages(golden_dir: Path) -> None:
    data, _, _ = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    rewards = torch.from_numpy(data["dance_reward_sorted"])
    groups = torch.arange(len(rewards)) // meta["group_size"]
    ours = group_advantages(rewards, groups, Normalizer(epsilon=1e-8, unbiased=True))
    np.testing.assert_allclose(ours, data["dance_adv_sorted"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", [0, 1])
def test_flow_factory_advantages(golden_dir: Path, key: int) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    both, weights = [rewards, torch.from_numpy(data["reward_b"])], [meta["weights"]["a"], meta["weights"]["b"]]
    normalizer = Normalizer(std="global" if key else "group", epsilon=1e-6, floor="max")
    total = sum(weight * reward.double() for weight, reward in zip(weights, both, strict=True))
    assert isinstance(total, torch.Tensor)
    ours = group_advantages(total, groups, normalizer)
    np.testing.assert_allclose(ours, data[f"ff_sum_globalstd{key}_gather"], rtol=1e-6, atol=1e-9)
    # 'contig' takes the batch std in float32 from sums of squares.
    np.testing.assert_allclose(ours, data[f"ff_sum_globalstd{key}_contig"], rtol=1e-5, atol=1e-6)
    gdpo = gdpo_advantages(both, weights, groups, Normalizer(epsilon=1e-6, floor="max"))
    constant = torch.stack([group_statistics(reward, groups).constant for reward in both]).all(0)[groups].numpy()
    for kind in ("gather", "contig"):
        expected = data[f"ff_gdpo_globalstd{key}_{kind}"]
        np.testing.assert_allclose(gdpo.numpy()[~constant], expected[~constant], rtol=1e-5, atol=1e-5)


def test_decays(golden_dir: Path) -> None:
    data, _ = load(golden_dir, "schedules.json")
    types = {"0": BehaviorDecay(), "1": BehaviorDecay(rate=0.001, maximum=0.5)}
    types["2"] = late = BehaviorDecay(flat=75, rate=0.0075, maximum=0.999)
    expected = {**data["decay"], **{f"nft{key}": values for key, values in data["decay"]["nft"].items()}}
    decays = {
        **{f"nft{key}": decay for key, decay in types.items()},
        "ff_piecewise": types["1"],
        "ff_linear": BehaviorDecay(rate=0.003, maximum=0.3),
        "dgpo_ema_ref": BehaviorDecay(rate=0.001, maximum=0.3),
        "crd_default_old": BehaviorDecay(start=0.25, rate=0.005, maximum=0.999),
        "crd_default_sampling": late,
        "ema_flowgrpo_0p9": partial(warm_decay, decay=0.9),
        "ff_power": partial(warm_decay, decay=0.995),
    }
    assert decays.keys() == expected.keys() - {"nft"}
    for name, decay in decays.items():
        assert [decay(step) for step in data["decay_steps"]] == pytest.approx(expected[name]), name


def test_ocr_score(golden_dir: Path) -> None:
    cases = load(golden_dir, "ocr.json")[0]["images"]
    assert cases
    for case in cases:
        lines, target = case["lines"] or [], quoted_text(case["prompt"])
        # Flow-Factory keeps lines the reader is not sure of.
        ours = ocr.text_score("".join(lines), target)
        assert ours == pytest.approx(case["flowfactory_reward"], abs=1e-9), case["prompt"]
        # Flow-GRPO drops them, and fails on a prompt without quotes; like Flow-Factory we then take the whole prompt.
        if case["image_reward"] is not None:
            ours = ocr.text_score("".join(sure_lines(case)), target)
            assert ours == pytest.approx(case["image_reward"], abs=1e-9), case["prompt"]


def sure_lines(case: Vectors) -> list[str]:
    pairs = zip(case["lines"] or [], case["confidences"] or [], strict=True)
    return [line for line, confidence in pairs if confidence > 0]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], ocr.OcrReward]:
    """Makes the OCR reward with a reader that reads given texts, as the vectors were made."""

    def make(texts: list[str]) -> ocr.OcrReward:
        monkeypatch.setattr(
            ocr, "_LineReader", lambda *options: SimpleNamespace(read=lambda media: texts[: len(media)])
        )
        return ocr.OcrReward(substring=False)

    return make


def test_ocr_score_of_clips(golden_dir: Path, read: Callable[[list[str]], ocr.OcrReward]) -> None:
    vectors, _ = load(golden_dir, "ocr.json")
    for case in vectors["videos"]:
        frames, every = case["frames"], case["frame_interval"]
        clip = np.zeros((1, len(frames), 4, 8, 3), np.uint8)
        reward = read(frames[::every])
        reward.every = every
        result = reward.score(clip, [case["prompt"]], [{}])
        assert result.values.tolist() == pytest.approx([case["reward"]], abs=1e-7)
        assert result.notes == [frames[0]]
    for case in vectors["images"]:
        if case["video_rule_single_frame"] is not None:
            assert case["target"] == quoted_text(case["prompt"])
            one = np.zeros((1, 1, 4, 8, 3), np.uint8)
            result = read(["".join(sure_lines(case))]).score(one, [case["prompt"]], [{}])
            assert result.values.tolist() == pytest.approx([case["video_rule_single_frame"]], abs=1e-7)


def test_jpeg_score(golden_dir: Path) -> None:
    data, _ = load(golden_dir, "jpeg_reward.npz")
    images = np.round(data["images"] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    ours = JpegCompressibility().score(images, [""] * len(images), [{}] * len(images)).values
    # Depends on the libjpeg build.
    np.testing.assert_allclose(ours, data["compressibility"], rtol=0.01)
    kilobytes = -JpegCompressibility(scale=1).score(images, [""] * len(images), [{}] * len(images)).values
    np.testing.assert_allclose(kilobytes, data["incompressibility"], rtol=0.01)
