"""Fits that train adapters of the backbone: what is stored and loaded, and a fit that is stopped in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.factory import make_reward
from flowmill.models.weights.lora import block_layers
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.fitting.fit import FittedModel, fit_reward
from flowmill.tasks.training.adamw import AdamW
from tests.support.clip import write_clip, write_siglip
from tests.support.judged import fit_config, write_pairs, write_rows
from tests.support.text_models import write_sentiment

SETTINGS = {"updates": 5, "batch_size": 16, "learning_rate": 1e-2, "lora": {"rank": 2, "alpha": 8}}


def texts(folder: Path) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{number}", "chosen": f"good days {number}", "rejected": f"bad days {number}"}
        for number in range(40)
    ]


def images(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in write_pairs(folder, 40).read_text().splitlines()]


@pytest.fixture(params=["siglip", "text"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a fit with 20 judgments on each side."""
    write: Callable[[Path], str] = {"siglip": write_siglip, "text": write_sentiment}[request.param]
    rows = (texts if request.param == "text" else images)(tmp_path)
    name = "text" if request.param == "text" else "clip"
    return {
        "data": write_rows(tmp_path / "train.jsonl", rows[:20]),
        "heldout": str(write_rows(tmp_path / "heldout.jsonl", rows[20:])),
        "backbone": {"name": name, "options": {"model": write(tmp_path / "model")}},
        **SETTINGS,
    }


def accuracy(made: FittedModel, settings: dict[str, Any]) -> float:
    """Return the share of held-out judgments that the loaded reward agrees with."""
    options = settings["backbone"]["options"]
    reward = make_reward("fitted", {"path": str(made.folder), "model": options["model"], "unproven": True})
    rows = [json.loads(line) for line in Path(settings["heldout"]).read_text().splitlines()]
    folder, sides = Path(settings["heldout"]).parent, []
    for side in ("chosen", "rejected"):
        if settings["backbone"]["name"] == "clip":
            media = np.stack([np.asarray(Image.open(folder / row[side])) for row in rows])
        else:
            media = np.array([row[side] for row in rows], object)
        sides.append(np.asarray(reward.score(media, [row["prompt"] for row in rows], [{}] * len(rows)).values))  # type: ignore[union-attr]
    return float((sides[0] > sides[1]).mean())


def test_a_stopped_fit_goes_on_and_the_reward_scores_as_it_was_measured(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit_reward(fit_config(tmp_path / "whole", **settings))
    step, steps = AdamW.step, []

    def killed(optimizer: AdamW) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        step(optimizer)

    monkeypatch.setattr(AdamW, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        fit_reward(fit_config(tmp_path / "killed", checkpoint_every=1, **settings))
    # After an interruption it may also stop to write checkpoints, or write others.
    resumed = fit_reward(fit_config(tmp_path / "killed", checkpoint_every=3, **settings))
    assert len(steps) == 4 + 2, "three of five updates are not repeated"
    stores = [ArtifactStore(str(tmp_path / name / "store")) for name in ("whole", "killed")]
    assert resumed.ref == whole.ref
    assert len({store.require(whole.ref).digest for store in stores}) == 1
    assert not list((tmp_path / "killed" / "store").rglob("_checkpoints/*"))
    assert verify_store(stores[1], deep=True)["problems"] == []
    files = {"README.md", "adapter.safetensors", "head.safetensors", "reward.json"}
    assert {file.name for file in resumed.folder.iterdir()} == files
    stored = load_file(resumed.folder / "adapter.safetensors")
    assert all(value.abs().sum() > 0 for name, value in stored.items() if ".layers.0." in name or ".layer.0." in name)
    trained = sum(value.numel() for value in stored.values())
    assert resumed.summary["trained"]["adapters"] == trained
    assert f"rank 2, alpha 8 and {trained:,} trained parameters" in (resumed.folder / "README.md").read_text()
    assert accuracy(resumed, settings) == pytest.approx(resumed.summary["heldout"]["accuracy"]["mean"])


def test_adapters_learn_change_scores_and_have_gradients(tmp_path: Path) -> None:
    clip, data = write_clip(tmp_path / "clip"), write_pairs(tmp_path, 60)
    backbone = {"name": "clip", "options": {"model": clip}}
    config = fit_config(tmp_path, data, backbone=backbone, share=0.4, **{**SETTINGS, "updates": 12})
    made = fit_reward(config)
    assert made.summary["curve"][-1]["train"] < made.summary["curve"][0]["train"]
    options = {"path": str(made.folder), "model": clip, "unproven": True}
    reward = make_reward("fitted", options)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 30, 3), np.uint8)
    found = np.asarray(reward.score(pixels, ["a", "b"], [{}] * 2).values)  # type: ignore[union-attr]
    smooth = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255).requires_grad_()
    followed = reward.differentiable(smooth, ["a", "b"], [{}] * 2)  # type: ignore[attr-defined]
    np.testing.assert_allclose(followed.detach().numpy(), found, atol=1e-4)
    followed.sum().backward()
    assert smooth.grad is not None
    assert smooth.grad.abs().sum() > 0
    other = tmp_path / "other"
    other.mkdir()
    for file in made.folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    stored = load_file(other / "adapter.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in stored.items()}, other / "adapter.safetensors")
    options["path"] = str(other)
    without = make_reward("fitted", options)
    assert (np.asarray(without.score(pixels, ["a", "b"], [{}] * 2).values) != found).all()  # type: ignore[union-attr]
    stored.popitem()
    save_file(stored, other / "adapter.safetensors")
    with pytest.raises(ConfigError, match="its adapters are of another model, rank or layers"):
        make_reward("fitted", options)


def test_settings_of_adapters_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    data = write_pairs(tmp_path, 40)
    config = {"share": 0.5, "lora": {"rank": 2}}
    with pytest.raises(ConfigError, match="lora: backbone 'pixels' has no pretrained model"):
        fit_reward(fit_config(tmp_path, data, **config))
    backbone = {"name": "clip", "options": {"model": write_clip(tmp_path / "clip")}}
    config["lora"] = {"rank": 2, "targets": ["q_prj"]}
    with pytest.raises(ConfigError, match=r"^lora: 'q_prj', .* matches no layer of 'clip'"):
        fit_reward(fit_config(tmp_path, data, backbone=backbone, **config))
    with pytest.raises(ValidationError, match=r"lora\.start belongs to policies"):
        fit_config(tmp_path, data, lora={"start": "x"})


def test_adapters_are_on_the_layers_of_numbered_blocks() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)}) for _ in range(2)])
            self.head = torch.nn.Linear(2, 2)

    assert block_layers(Model()) == ("mlp",)
