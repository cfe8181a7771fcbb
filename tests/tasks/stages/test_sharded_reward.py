"""Ranks that hold the models of rewards together score as one process does, though they make unequally many calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from configs.errors import ConfigError
from configs.rewards import RewardSection
from models.rewards.base import Batch, Needs
from models.rewards.device_placement import modules_of
from models.rewards.factory import MadeRewards
from models.rewards.invocation import Handling, needs_of_made, score
from models.rewards.testing import samples
from models.weights.sharding import Sharding, layers, local
from tasks.runtime.ranks import Ranks
from tasks.stages.sharded_reward import SpreadReward, first_call
from tests.support.clip import write_clip
from tests.support.published_rewards import write_hpsv3, write_image_reward, write_video_align
from tests.support.ranks import RANKS
from tests.support.text_models import write_sentiment
from tests.support.vlm import write_vlm

WORLD = 2
#: Of six samples each rank scores so many, two to a call.
SHARES = ([0, 1, 2, 3], [4, 5])


def sections(folder: Path) -> list[RewardSection]:
    files = {name: str(folder / name) for name in ("clip", "hpsv3", "blip", "video", "sentiment", "vlm")}
    options: dict[str, dict[str, Any]] = {
        "clip_score": {"model": files["clip"]},
        "hpsv3": {
            "weights": f"{files['hpsv3']}/HPSv3.safetensors",
            "instruction": f"{files['hpsv3']}/instruction.txt",
            "model": files["hpsv3"],
            "dtype": "float32",
        },
        "imagereward": {"weights": f"{files['blip']}/ImageReward.safetensors", "tokenizer": files["blip"]},
        "quality_levels": {"model": files["vlm"], "dtype": "float32"},
        "sequence_classification": {"model": files["sentiment"], "label": "POSITIVE"},
        "video_align": {
            "weights": f"{files['video']}/VideoReward.safetensors",
            "settings": f"{files['video']}/model_config.json",
            "instruction": f"{files['video']}/question.txt",
            "model": files["video"],
            "dtype": "float32",
        },
    }
    return [
        RewardSection(name=name, options=given, spread=True, batch_size=2, frames="clip")
        for name, given in options.items()
    ]


def batch_for(reward: Any) -> Batch:
    media = needs_of_made(reward).media
    if media == "texts":
        return samples(texts=["good days", "a bad sign", "happy days are here"])
    return samples(shape=(4, 56, 56, 3) if media == "clips" else (56, 56, 3))


def held(reward: Any) -> dict[str, int]:
    """Return the bytes of a reward's models on this rank: in layers, and elsewhere."""
    modules = modules_of(reward)
    inside = [p for module in modules for layer in layers(module) for p in layer.parameters()]
    every = [p for module in modules for p in module.parameters()]
    sizes = [sum(local(p).numel() * p.element_size() for p in some) for some in (inside, every)]
    return {"layers": sizes[0], "rest": sizes[1] - sizes[0]}


def _score(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    ranks, made = Ranks(rank, WORLD), MadeRewards()
    made.sharding = Sharding.over(torch.device("cpu"), world=WORLD, size=WORLD, offload=False)
    for section in sections(folder):
        reward = made.of(section)
        batch, handling = batch_for(reward), Handling.of(section)
        together = SpreadReward(reward, ranks)
        found = score(together, section.slot, batch.take(SHARES[rank]), handling)
        needs = needs_of_made(reward)
        together.rest(lambda batch=batch, handling=handling, needs=needs: first_call(needs, "", batch, handling))
        np.savez(folder / f"{section.slot}-{rank}.npz", values=found.values, **held(reward))
    dist.destroy_process_group()


@pytest.mark.slow
def test_scores_are_those_of_one_process_to_the_bit(tmp_path: Path) -> None:
    for name in ("clip", "hpsv3", "blip", "video"):
        (tmp_path / name).mkdir()
    write_clip(tmp_path / "clip")
    write_hpsv3(tmp_path / "hpsv3")
    write_image_reward(tmp_path / "blip")
    write_video_align(tmp_path / "video")
    write_sentiment(tmp_path / "sentiment")
    write_vlm(tmp_path / "vlm")
    ranks = [RANKS.Process(target=_score, args=(rank, tmp_path)) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    alone = MadeRewards()
    expected = {}
    for section in sections(tmp_path):
        reward = alone.of(section)
        expected[section.slot] = (
            score(reward, section.slot, batch_for(reward), Handling.of(section)).values,
            held(reward),
        )
    for each in ranks:
        each.join(120)
        assert each.exitcode == 0
    for slot, (values, whole) in expected.items():
        found = [np.load(tmp_path / f"{slot}-{rank}.npz") for rank in range(WORLD)]
        np.testing.assert_array_equal(np.concatenate([each["values"] for each in found]), values, err_msg=slot)
        assert sum(int(each["layers"]) for each in found) == whole["layers"], slot
        assert max(int(each["layers"]) for each in found) < 0.6 * whole["layers"], slot
        assert all(int(each["rest"]) == whole["rest"] for each in found), slot


class Unsettled:
    """Says that it can be spread, but places its model itself."""

    needs = Needs(accelerated=True, batch_size=2, spreads=True)

    def __init__(self) -> None:
        self._net = nn.Linear(2, 2)

    def score(self, media: np.ndarray, prompts: Any, metadata: Any) -> list[float]:
        return [0.0] * len(prompts)


def test_one_that_places_its_models_itself_is_refused() -> None:
    made = MadeRewards()
    made.sharding = Sharding(mesh=cast(Any, None))
    section = RewardSection(name=f"{__name__}:Unsettled", label="own", spread=True)
    with pytest.raises(ConfigError, match=r"'own' has spread set .* every rank holds all of its models"):
        made.of(section)
    assert MadeRewards().of(section)


class _Paired(nn.Module):
    """Two lists of layers, one within the other's, and one of a single module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(2, 2)] * 2)}) for _ in range(3))
        self.one = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]))])


def test_layers_are_the_members_of_outermost_lists() -> None:
    net: Any = _Paired()
    assert list(layers(net)) == [*net.blocks, net.one[0][0][0], net.one[0][0][2]]
