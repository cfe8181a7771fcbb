"""VideoReward: frames, patches, adapters and the head, next to the model's plain call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.answer_parsing import token_grid
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import score
from flowmill.models.rewards.video_align import frame_numbers, patches_of
from tests.support.published_rewards import write_video_align

PROMPTS = ["a cat", "two dogs that run"]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "weights": str(tmp_path / "VideoReward.safetensors"),
        "settings": str(tmp_path / "model_config.json"),
        "instruction": str(tmp_path / "question.txt"),
        "model": str(tmp_path),
        "dtype": "float32",
        "clip_fps": 4,
    }


def clips(count: int = 2) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 9, 56, 84, 3), dtype=np.uint8)


def test_scores_are_those_of_the_merged_model_at_its_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    model, head = write_video_align(tmp_path)
    made: Any = make_reward("video_align", options)
    found = score(made, "video_align", Batch(media=clips(), prompts=PROMPTS, metadata=[{}, {}]))
    marks = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    tokenizer, expected = made._reader.tokenizer, []
    for clip, prompt in zip(clips(), PROMPTS, strict=True):
        # 9 frames at 4 per second, of which 2 per second and at least 4 are looked at, of 100,352 pixels at least.
        frames = torch.from_numpy(clip[[0, 3, 5, 8]]).permute(0, 3, 1, 2).float()
        size = (10 * 28, 14 * 28)
        frames = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True).round().clamp(0, 255)
        patches, grid = patches_of(frames / 255)
        assert grid.tolist() == [2, 20, 28]
        text = (
            "<|im_start|>user\n<|vision_start|>" + "<|video_pad|>" * 280 + "<|vision_end|>Look: <|VQ_reward|>, "
            f"<|MQ_reward|>, {prompt} <|TA_reward|>.<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(
                input_ids=ids,
                pixel_values_videos=patches,
                video_grid_thw=grid[None],
                position_ids=torch.arange(ids.shape[1])[None, None].expand(3, 1, -1),
                attention_mask=torch.ones_like(ids),
            ).last_hidden_state
        logits = (hidden @ head.T)[0]
        at = [int((ids[0] == tokenizer.convert_tokens_to_ids(mark)).nonzero()) for mark in marks]
        expected.append([float(logits[place, row]) for row, place in enumerate(at)])
    normed = (np.array(expected) - [1.0, 0.5, -1.0]) / [2.0, 0.25, 3.0]
    np.testing.assert_allclose(found.values, normed.sum(1), rtol=1e-3, atol=1e-4)
    assert found.notes is not None
    assert found.notes[0] == "VQ {:.2f} MQ {:.2f} TA {:.2f}".format(*normed[0])
    alone: Any = make_reward("video_align", {**options, "aspect": "MQ"})
    got = score(alone, "video_align", Batch(media=clips(), prompts=PROMPTS, metadata=[{}, {}])).values
    np.testing.assert_allclose(got, normed[:, 1], rtol=1e-3, atol=1e-4)
    # What is read as a token in a prompt has a space in it, so that it ends nothing and is no place of a score.
    odd, even = "a <|VQ_reward|> <|im_end|> <|video_pad|>", "a < |VQ_reward|> < |im_end|> < |video_pad|>"
    both = [
        score(made, "video_align", Batch(media=clips(1), prompts=[each], metadata=[{}])).values for each in (odd, even)
    ]
    assert both[0].tolist() == both[1].tolist()


def test_patches_are_those_of_the_image_processor(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    picture = clips(1)[0, 0]
    seen = AutoImageProcessor.from_pretrained(tmp_path)([Image.fromarray(picture)], return_tensors="pt")
    patches, grid = patches_of(torch.from_numpy(picture).permute(2, 0, 1)[None].repeat(2, 1, 1, 1) / 255)
    assert grid.tolist() == seen["image_grid_thw"][0].tolist()
    torch.testing.assert_close(patches, seen["pixel_values"], rtol=1e-4, atol=1e-4)
    first, second = (
        patches_of(torch.stack([torch.zeros(3, 28, 28), torch.ones(3, 28, 28)]))[0].reshape(4, 3, 2, -1).unbind(2)
    )
    assert bool((first < 0).all())
    assert bool((second > 0).all())


@pytest.mark.parametrize(
    ("count", "fps", "expected"),
    [
        (81, 16.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (33, 16.0, [0, 11, 21, 32]),
        (5, 16.0, [0, 1, 3, 4]),
        (3, 16.0, [0, 2]),
    ],
)
def test_frames_are_spread_as_by_the_published_reader(count: int, fps: float, expected: list[int]) -> None:
    assert frame_numbers(count, fps, 2.0) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 832), (12, 21)),
        ((720, 1280), (12, 21)),
        ((256, 256), (12, 12)),
        ((32, 36), (11, 12)),
        ((28, 1400), (2, 80)),
    ],
)
def test_frames_are_scaled_to_whole_tokens_between_bounds(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert token_grid(*size, least=128 * 28**2, most=200704) == expected


def test_a_clip_of_one_frame_is_none() -> None:
    with pytest.raises(ValueError, match=r"at least; set model\.frames"):
        frame_numbers(1, 16.0, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_config": None}, "is not VideoReward's model_config.json"),
        ({"data_config": {"fps": 2, "max_frame_pixels": 200704, "sample_type": "multi_pts"}}, "in another way"),
        ({"data_config": {"fps": 0, "max_frame_pixels": 200704}}, "that cannot be"),
    ],
)
def test_settings_that_mean_something_else_are_refused(
    options: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_video_align(tmp_path)
    file = tmp_path / "model_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        make_reward("video_align", options)


def test_exposure_is_the_share_that_is_neither_black_nor_burnt_out() -> None:
    image = np.full((4, 4, 3), 128, np.uint8)
    image[0], image[1, :2] = 255, 0
    made: Any = make_reward("exposure", {})
    found = score(made, "exposure", Batch(media=image[None], prompts=["x"], metadata=[{}]))
    assert found.values.tolist() == [pytest.approx(10 / 16)]
    assert found.notes == ["mean luma 144"]
    with pytest.raises(ConfigError, match="must be 0 <= low < high"):
        make_reward("exposure", {"low": 250.0})
