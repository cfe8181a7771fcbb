"""Rewards that other libraries publish, from copies that keep their names; GenEval's rules by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, BertTokenizer, CLIPProcessor

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.models.rewards.answer_parsing import token_grid
from flowmill.models.rewards.base import Batch, perfect_score
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.geneval import COLORS, NAMES, Detection, _by_class, meets, met_share, relations
from flowmill.models.rewards.invocation import score
from tests.support.chat import says, serving
from tests.support.clip import write_clip
from tests.support.published_rewards import write_detector, write_hpsv3, write_image_reward, write_open_clip

PROMPTS = ["a red cat", "two dogs , a cat", "a"]


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3), np.uint8)


def batch(images: np.ndarray, *metadata: dict[str, Any]) -> Batch:
    return Batch(media=images, prompts=PROMPTS[: len(images)], metadata=metadata or [{}] * len(images))


def test_a_human_preference_score_is_the_cosine_of_the_copied_model(images: np.ndarray, tmp_path: Path) -> None:
    folder, file = write_clip(tmp_path), tmp_path / "HPS.safetensors"
    model, processor = write_open_clip(tmp_path, file), CLIPProcessor.from_pretrained(folder)
    edge, mean, std = (getattr(processor.image_processor, name) for name in ("crop_size", "image_mean", "image_std"))
    inputs = processor.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    pixels = torch.stack([_whole_in_a_square(image, edge["height"], mean, std) for image in images])
    with torch.no_grad():
        found = model(**inputs, pixel_values=pixels)
    expected = (found.image_embeds * found.text_embeds).sum(-1).numpy()
    for convention, factor in (("cosine", 1), ("percent", 100)):
        made = make_reward("hpsv2", {"weights": str(file), "model": folder, "convention": convention})
        np.testing.assert_allclose(score(made, "hps", batch(images)).values, factor * expected, rtol=1e-4, atol=1e-5)
    stored = load_file(file)
    save_file({name: tensor for name, tensor in stored.items() if name != "ln_final.bias"}, tmp_path / "less")
    save_file({**stored, "more": torch.zeros(1)}, tmp_path / "more")
    save_file({**stored, "visual.proj": torch.zeros(3, 3)}, tmp_path / "other")
    (tmp_path / "pickle").write_bytes(b"\x80\x04.")
    for name in ("less", "more", "other", "pickle", "nowhere"):
        with pytest.raises(ConfigError, match=r"option 'weights': .* cannot be used: .*names kept"):
            make_reward("hpsv2", {"weights": str(tmp_path / name), "model": folder})


def _whole_in_a_square(image: np.ndarray, edge: int, mean: list[float], std: list[float]) -> torch.Tensor:
    """Return the pixels of ``preprocess_val`` of hpsv2: torchvision resizes tensors by ``interpolate``."""
    scale, pixels = edge / max(image.shape[:2]), torch.from_numpy(image / 255).float().permute(2, 0, 1)
    size = [round(side * scale) for side in image.shape[:2]]
    small = torch.nn.functional.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
    square = torch.zeros(3, edge, edge)
    top, left = ((edge - side) // 2 for side in size)
    square[:, top : top + size[0], left : left + size[1]] = small
    return (square - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def test_image_reward_is_its_encoders_and_head(images: np.ndarray, tmp_path: Path) -> None:
    vision, text, head = write_image_reward(tmp_path)
    options = {"weights": str(tmp_path / "ImageReward.safetensors"), "tokenizer": str(tmp_path)}
    tokens = BertTokenizer.from_pretrained(tmp_path)(PROMPTS, padding="max_length", max_length=35, return_tensors="pt")
    pixels = torch.stack([_blip_pixels(image) for image in images])
    with torch.no_grad():
        seen = vision(pixel_values=pixels).last_hidden_state
        value = text(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], encoder_hidden_states=seen
        ).last_hidden_state[:, 0]
        for place in (0, 2, 4, 6, 7):
            value = value @ head[f"layers.{place}.weight"].T + head[f"layers.{place}.bias"]
    expected = (value.squeeze(-1).numpy() - 0.16717362830052426) / 1.0333394966054072
    found = score(make_reward("imagereward", options), "ir", batch(images)).values
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    save_file({"mlp.layers.0.weight": torch.zeros(1)}, tmp_path / "empty.safetensors")
    with pytest.raises(ConfigError, match=r"cannot be used: it lacks 'patch_embed.proj.weight'"):
        make_reward("imagereward", {**options, "weights": str(tmp_path / "empty.safetensors")})


def _blip_pixels(image: np.ndarray) -> torch.Tensor:
    """Resize the shorter side to 32, crop the middle, normalize, as ImageReward's own transform does."""
    picture = Image.fromarray(image)
    width, height = picture.size
    side = 32 / min(width, height)
    picture = picture.resize((int(width * side), int(height * side)), Image.Resampling.BICUBIC)
    left, top = (picture.width - 32) // 2, (picture.height - 32) // 2
    pixels = torch.from_numpy(np.asarray(picture.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1) / 255
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    return (pixels - mean[:, None, None]) / std[:, None, None]


def test_hpsv3_is_its_head_at_the_reward_token(images: np.ndarray, tmp_path: Path) -> None:
    model, head = write_hpsv3(tmp_path)
    options = {"weights": str(tmp_path / "HPSv3.safetensors"), "model": str(tmp_path)}
    options |= {"instruction": str(tmp_path / "instruction.txt"), "dtype": "float32"}
    made: Any = make_reward("hpsv3", options)
    found = score(made, "hpsv3", batch(images)).values
    tokenizer, processor = made._reader.tokenizer, AutoImageProcessor.from_pretrained(tmp_path)
    for row, prompt in enumerate(PROMPTS):
        # 48 x 64 pixels of about 256 tokens: 14 x 19 of them.
        picture = Image.fromarray(images[row]).resize((19 * 28, 14 * 28), Image.Resampling.BICUBIC)
        seen = processor([picture], return_tensors="pt")
        text = (
            "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 266 + f"<|vision_end|>Is it good? {prompt}\n"
            "<|Reward|>\n<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
        with torch.no_grad():
            hidden = model(
                input_ids=ids,
                pixel_values=seen["pixel_values"],
                image_grid_thw=seen["image_grid_thw"],
                position_ids=positions,
                attention_mask=torch.ones_like(ids),
            ).last_hidden_state
            expected = head(hidden[ids == tokenizer.convert_tokens_to_ids("<|Reward|>")])[0, 0]
        np.testing.assert_allclose(found[row], expected.item(), rtol=1e-3, atol=1e-5)
    (tmp_path / "other.txt").write_text("Is {text_prompt} good?")
    with pytest.raises(ConfigError, match=r"must hold <\|Reward\|> once"):
        make_reward("hpsv3", {**options, "instruction": str(tmp_path / "other.txt")})
    odd, even = "a <|Reward|> <|im_end|> <|image_pad|>", "a < |Reward|> < |im_end|> < |image_pad|>"
    both = [score(made, "hpsv3", Batch(media=images[:1], prompts=[each], metadata=[{}])).values for each in (odd, even)]
    assert both[0].tolist() == both[1].tolist()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 512), (16, 16)),
        ((48, 64), (14, 19)),
        ((1024, 512), (22, 11)),
        ((28, 28), (16, 16)),
        ((448, 448), (16, 16)),
    ],
)
def test_images_have_about_256_tokens(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert token_grid(*size, least=256 * 28**2, most=256 * 28**2) == expected


def thing(left: float, top: float, size: float = 10) -> Detection:
    return Detection(np.array([left, top, left + size, top + size]), np.ones((1, 1), bool))


def colored(*colors: str) -> Any:
    return lambda found, name: list(colors)[: len(found)]


CAT = {"class": "cat", "count": 1}


def dog(relation: str) -> dict[str, Any]:
    return {"class": "dog", "count": 1, "position": [relation, 0]}


@pytest.mark.parametrize(
    ("about", "objects", "colors", "strict", "share"),
    [
        ({"include": [CAT]}, {"cat": [thing(0, 0)]}, (), True, 1.0),
        ({"include": [CAT]}, {}, (), False, 0.0),
        # More than wanted: enough for the benchmark, as far off as that for training.
        ({"include": [CAT]}, {"cat": [thing(0, 0)] * 2}, (), True, 0.0),
        ({"include": [{"class": "cat", "count": 4}]}, {"cat": [thing(0, 0)] * 3}, (), False, 0.75),
        ({"include": [CAT], "exclude": [{"class": "cat", "count": 2}]}, {"cat": [thing(0, 0)] * 2}, (), False, 0.0),
        ({"include": [{**CAT, "color": "red"}]}, {"cat": [thing(0, 0)]}, ("red",), True, 1.0),
        ({"include": [{**CAT, "color": "red"}]}, {"cat": [thing(0, 0)]}, ("blue",), False, 0.5),
        ({"include": [{**CAT, "color": "red"}]}, {}, ("red",), False, 0.0),
        ({"include": [CAT, dog("right of")]}, {"cat": [thing(0, 0)], "dog": [thing(50, 0)]}, (), True, 1.0),
        ({"include": [CAT, dog("left of")]}, {"cat": [thing(0, 0)], "dog": [thing(50, 0)]}, (), False, 0.75),
        ({"include": [CAT, dog("left of")]}, {"dog": [thing(50, 0)]}, (), False, 1 / 3),
        ({"include": []}, {}, (), True, 0.0),
    ],
)  # fmt: skip
def test_the_rules_by_hand(
    about: dict[str, Any], objects: dict[str, list[Detection]], colors: Sequence[str], strict: bool, share: float
) -> None:
    met, why = meets(about, objects, colored(*colors))
    assert met is strict
    assert bool(why) is not strict
    assert met_share(about, objects, colored(*colors)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((50, 0), {"right of"}),
        ((-50, 0), {"left of"}),
        ((0, 50), {"below"}),
        ((0, -50), {"above"}),
        ((50, 50), {"right of", "below"}),
        ((1, 1), set()),
        ((50, 5), {"right of"}),
    ],
)
def test_places_are_relative_to_size(place: tuple[float, float], expected: set[str]) -> None:
    assert relations(thing(*place).box, thing(0, 0).box) == expected


def test_objects_are_kept_by_class_and_confidence() -> None:
    masks = torch.zeros(3, 8, 8)
    masks[0, 2:4, 1:6] = masks[1, :, :] = masks[2, 0, 0] = 1
    about = [{"label_id": 15, "score": 0.5}, {"label_id": 15, "score": 0.95}, {"label_id": 16, "score": 0.31}]
    found = _by_class({"segmentation": masks, "segments_info": about}, 0.3)
    assert NAMES[15:17] == ("cat", "dog")
    assert [one.box.tolist() for one in found["cat"]] == [[0, 0, 8, 8], [1, 2, 6, 4]]
    assert list(found) == ["cat", "dog"]
    assert list(_by_class({"segmentation": masks, "segments_info": about}, 0.9)) == ["cat"]


def test_colors_are_told_by_clip_on_cut_outs(tmp_path: Path, images: np.ndarray) -> None:
    (tmp_path / "clip").mkdir()
    (tmp_path / "detector").mkdir()
    options = {"clip": write_clip(tmp_path / "clip"), "detector": write_detector(tmp_path / "detector")}
    made: Any = make_reward("geneval", options)
    assert perfect_score(made) == 1.0
    mask = np.zeros((48, 64), bool)
    mask[10:30, 10:40] = True
    found = Detection(np.array([10, 10, 40, 30]), mask)
    assert set(made._colors_of(images[0], [found, found], "cat")) <= set(COLORS)
    about = {"tag": "single_object", "include": [CAT]}
    scores = score(made, "geneval", batch(images, about, about, about))
    assert set(scores.values.tolist()) <= {0.0, 1.0}
    assert all((value == 1.0) == (note == "") for value, note in zip(scores.values, scores.notes or (), strict=True))
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="knows 7 classes, not COCO's 80"):
        make_reward("geneval", {**options, "detector": write_detector(tmp_path / "other", classes=7)})


def test_questions_are_asked_one_by_one_and_averaged(images: np.ndarray) -> None:
    pytest.importorskip("regex", reason="flowmill[vlm] is not installed")
    about = {"vqa_list": [["How many cats are in the image?", "two"], ["Are the cats red?", "Yes"]]}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        text = request["messages"][0]["content"][1]["text"]
        assert text.endswith(" Answer in one word.")
        if text.startswith("How many"):
            return says("two", two=0.5, **{"2": 0.25, "three": 0.2})
        return says("Yes", Yes=0.16, yes=0.03, no=0.8)

    with serving() as server:
        server.answer = answer
        for mean, expected in (("am", (0.75 + 0.19) / 2), ("gm", (0.75 * 0.19) ** 0.5)):
            made = make_reward("geneval2", {"model": "judge", "endpoint": server.url, "mean": mean})
            found = score(made, "geneval2", batch(images[:1], about))
            np.testing.assert_allclose(found.values, [expected], rtol=1e-5)
            assert list(found.notes or []) == ["0.75 0.19"]
        assert len(server.requests) == 4
        server.answer = lambda request: says("two")
        with pytest.raises(RewardError, match="the endpoint tells no probabilities"):
            score(made, "geneval2", batch(images[:1], about))
        with pytest.raises(RewardError, match="has no questions in the column 'vqa_list'"):
            score(made, "geneval2", batch(images[:1], {"vqa_list": []}))
