"""The contract of every reward; parametrized over the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.rewards import RewardSection
from flowmill.models.quickstart.corpus import digit_pairs, rendered_words
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.base import Batch, Scores, perfect_score, quoted_text
from flowmill.models.rewards.factory import FunctionReward, check_reward, make_reward, works_on_accelerator
from flowmill.models.rewards.invocation import declared_needs
from flowmill.models.rewards.ocr import edit_distance, text_score
from flowmill.models.rewards.testing import CONTRACT, random_references, samples
from tests.support.chat import Endpoint, says, serving
from tests.support.clap import write_clap
from tests.support.clip import write_clip, write_head, write_latent_head
from tests.support.judged import write_fitted
from tests.support.published_rewards import (
    write_detector,
    write_dina,
    write_hpsv3,
    write_image_reward,
    write_open_clip,
    write_video_align,
)
from tests.support.rewards import scored
from tests.support.text_models import write_sentiment
from tests.support.vlm import write_vlm

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP model, an aesthetic predictor, and an image to compare with."""
    folder = tmp_path_factory.mktemp("clip")
    write_clip(folder)
    write_head(folder / "head.safetensors")
    write_latent_head(folder / "latent.safetensors")
    write_open_clip(folder, folder / "HPS.safetensors")
    write_fitted(folder / "fitted")
    for name in ("blip", "detector", "dina", "hpsv3", "video"):
        (folder / name).mkdir()
    write_image_reward(folder / "blip")
    write_detector(folder / "detector")
    write_hpsv3(folder / "hpsv3")
    write_video_align(folder / "video")
    write_sentiment(folder / "sentiment")
    write_clap(folder / "clap")
    write_vlm(folder / "vlm")
    Image.fromarray(images()[0]).save(folder / "wanted.png")
    return folder


#: What every judge finds its verdict in.
ANSWER = 'Final Score: 4. Image 1 is better. "score": [20, 15]'


@pytest.fixture(scope="module")
def dina(clip: Path, tiny_base: Path) -> dict[str, str]:
    return write_dina(clip / "dina", tiny_base)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        server.answer = lambda request: says(ANSWER, yes=0.5, no=0.25)
        yield server


@pytest.fixture
def build(clip: Path, dina: dict[str, str], endpoint: Endpoint) -> Callable[..., Any]:
    """Return what makes a reward, with the options it cannot do without."""
    model = {"model": str(clip)}
    needed: dict[str, dict[str, Any]] = {
        "aesthetic": {**model, "head": str(clip / "head.safetensors")},
        "clap": {"model": str(clip / "clap")},
        "clip_diversity": model,
        "clip_score": model,
        "dina_lrm": {**dina, "taps": (1,), "dtype": "float32", "max_sequence_length": 1},
        "fitted": {"path": str(clip / "fitted")},
        "geneval": {"clip": str(clip), "detector": str(clip / "detector")},
        "geneval2": {"model": "judge", "endpoint": endpoint.url},
        "hpsv3": {
            "weights": str(clip / "hpsv3" / "HPSv3.safetensors"),
            "instruction": str(clip / "hpsv3" / "instruction.txt"),
            "model": str(clip / "hpsv3"),
            "dtype": "float32",
        },
        "hpsv2": {"weights": str(clip / "HPS.safetensors"), "model": str(clip)},
        "imagereward": {"weights": str(clip / "blip" / "ImageReward.safetensors"), "tokenizer": str(clip / "blip")},
        "latent_head": {"head": str(clip / "latent.safetensors")},
        "rank": {"reward": "jpeg_compressibility"},
        "image_similarity": {**model, "folder": str(clip)},
        "pickscore": {**model, "processor": str(clip)},
        "quality_levels": {"model": str(clip / "vlm"), "dtype": "float32"},
        "reasoning_gym": {"pattern": "(.+)"},
        "sequence_classification": {"model": str(clip / "sentiment"), "label": "POSITIVE"},
        "video_align": {
            "weights": str(clip / "video" / "VideoReward.safetensors"),
            "settings": str(clip / "video" / "model_config.json"),
            "instruction": str(clip / "video" / "question.txt"),
            "model": str(clip / "video"),
            "dtype": "float32",
        },
        **{judge: {"model": "judge", "endpoint": endpoint.url} for judge in ("edit_reward", "vlm_judge", "win_rate")},
    }

    def make(name: str, **options: Any) -> Any:
        if name == "ocr":
            pytest.importorskip("rapidocr_onnxruntime", reason="flowmill[ocr] is not installed")
        if name in ("edit_reward", "geneval2", "vlm_judge", "win_rate"):
            pytest.importorskip("regex", reason="flowmill[vlm] is not installed")
        if name == "lexicon":
            pytest.importorskip("vaderSentiment", reason="flowmill[text] is not installed")
        if name == "reasoning_gym":
            pytest.importorskip("reasoning_gym", reason="flowmill[reasoning] is not installed")
        return make_reward(name, {**needed.get(name, {}), **options})

    return make


@pytest.fixture(params=sorted(REWARDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def images(count: int = 6) -> np.ndarray:
    _, gray = digit_pairs(count, seed=3)
    return np.repeat(gray[..., None], 3, -1)


ABOUT = {"tag": "counting", "include": [{"class": "cat", "count": 1}], "vqa_list": [["Is it red?", "Yes"]]}
METADATA = [{"image": "wanted.png", **ABOUT}] * 6
PROMPTS = [f'"{n}{n}"' for n in range(6)]


#: Options with which a reward looks at the images that prompts start from.
SEES_SOURCES = {
    "image_similarity": {"to": "source"},
    "rank": {"reward": "image_similarity", "options": {"to": "source", "by": "ssim"}},
    "vlm_judge": {"references": True},
    "win_rate": {"references": True},
}


@pytest.mark.parametrize("name", sorted(SEES_SOURCES))
def test_the_contract_with_sources(build: Build, name: str) -> None:
    reward = build(name, **SEES_SOURCES[name])
    assert declared_needs(reward).references
    for holds in CONTRACT:
        holds(reward, samples(references=2))


def test_the_contract(build: Build, name: str) -> None:
    """One reward keeps all of it, one rule after the other."""
    reward = build(name)
    texts = samples(texts=["good days", "a bad sign", "happy days are here"])
    others = {
        "clips": samples(shape=(4, 32, 48, 3)),
        "sounds": replace(sounds := samples(latents=True, shape=(4800, 2)), media=sounds.media.clip(-1, 1)),
        "latents": samples(latents=True, shape=(4, 8, 8)),
        "texts": replace(
            texts, metadata=[{"answer": "a bad sign", "dataset": "chain_sum", "entry": "{}"}] * len(texts)
        ),
    }
    made = Batch(media=images(), prompts=PROMPTS, metadata=METADATA, groups=["a", "b", "a", "b", "c", "c"])
    needs = declared_needs(reward)
    made = others.get(needs.media, replace(made, references=random_references(6, 1) if needs.references else ()))
    for holds in CONTRACT:
        # Three samples suffice where there are no groups.
        holds(reward, made if needs.groupwise else made.take([0, 1, 2]))


def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no option 'nonsense'"):
        make_reward(name, {"nonsense": 1})


def test_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        make_reward("digit", {})


@pytest.mark.parametrize("classifier", ["svc", "trees"])
def test_digits_are_read(build: Build, classifier: str) -> None:
    texts, gray = digit_pairs(64, seed=5)
    media = np.repeat(gray[..., None], 3, -1)
    reward = build("digits", classifier=classifier)
    right = scored(reward, "digits", media, [f'"{text}"' for text in texts], [{}] * 64)
    assert right.values.mean() > 0.97
    assert next(iter(right.notes or [])) == texts[0]
    named = build("digits", classifier=classifier, column="number")
    same = scored(named, "digits", media, [""] * 64, [{"number": text} for text in texts])
    np.testing.assert_array_equal(same.values, right.values)
    wrong = scored(reward, "digits", media, [f'"{(int(text) + 11) % 100:02d}"' for text in texts], [{}] * 64)
    assert wrong.values.mean() < 0.1


def test_words_are_read_by_real_ocr(build: Build) -> None:
    texts, gray = rendered_words(32, 1, ["CAT", "DOG", "TEN"])
    media = np.repeat(gray[..., None], 3, -1)
    read = scored(build("ocr"), "ocr", media, [f'"{text}"' for text in texts], [{}] * 32)
    assert read.values.mean() > 0.95
    nothing = scored(build("ocr"), "ocr", np.full_like(media, 255), [f'"{text}"' for text in texts], [{}] * 32)
    assert nothing.values.max() == 0


@pytest.mark.parametrize(
    ("read", "target", "expected"),
    [("CAT", "cat", 1.0), ("CART", "cat", 2 / 3), ("xxcatxx", "cat", 1.0), ("", "cat", 0.0), ("c a t", "cat", 1.0)],
)
def test_text_score_by_hand(read: str, target: str, expected: float) -> None:
    assert text_score(read, target) == pytest.approx(expected)


def test_text_score_details() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert text_score("xxcatxx", "cat", substring=False) == 0.0
    assert quoted_text('a "b" c') == "b"
    assert quoted_text("a b c") == "a b c"
    with pytest.raises(ValueError, match="asks for no text"):
        text_score("x", " ")


class Broken:
    """Returns the given values."""

    perfect = 7.0

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> Sequence[float]:
        return self.values


class Counting:
    """The brightness of an image, which it says too."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> Scores:
        values = media.reshape(len(media), -1).mean(1)
        return Scores(values, [f"{value:g}" for value in values])


@pytest.mark.parametrize(("frames", "values"), [(1, [2.0, 4.0]), (2, [2.5, 4.0]), ("first", [3.0, 2.0])])
def test_clips_are_scored_by_their_frames(frames: int | str, values: list[float]) -> None:
    clips = np.array([[3, 1, 2], [2, 4, 6]], np.uint8)[..., None, None, None].repeat(3, -1)
    found = scored(Counting(), "mine", clips, ["", ""], [{}, {}], frames=frames)
    np.testing.assert_array_equal(found.values, np.array(values, np.float32))
    assert list(found.notes or []) == ["3", "2"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(RewardError, match=r"returned (nan|inf) for prompt '\"11\"' \(1 of 2"):
        scored(Broken([0.5, value]), "broken", images(2), PROMPTS[:2], [{}] * 2)


def test_a_missing_score_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"returned a list of 1, which begins with 0.5 for"):
        scored(Broken([0.5]), "broken", images(2), PROMPTS[:2], [{}] * 2)


def test_only_some_rewards_know_an_exact_match(build: Build) -> None:
    assert perfect_score(Broken([])) == 7.0
    assert perfect_score(build("digits")) == 1.0
    assert perfect_score(build("ocr")) == 1.0
    assert perfect_score(build("jpeg_compressibility")) is None


@pytest.mark.parametrize(("options", "channel"), [({}, 0), ({"channel": 2}, 2)])
def test_a_function_is_a_reward(options: dict[str, Any], channel: int) -> None:
    media = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    made = make_reward("tests.support.rewards:brightness", options)
    assert isinstance(made, FunctionReward)
    found = scored(made, "mine", media, [""] * 4, [{}] * 4)
    np.testing.assert_allclose(found.values, media[..., channel].mean((1, 2)) / 255, rtol=1e-6)
    assert perfect_score(made) is None
    assert not works_on_accelerator(RewardSection(name="tests.support.rewards:brightness"))


@pytest.mark.parametrize("name", ["may_read", "Measured", "Called", "Timed", "BoundAtOnce"])
def test_every_form_that_can_be_called_is_a_reward(name: str) -> None:
    check_reward(f"tests.support.rewards:{name}", {})
    made = make_reward(f"tests.support.rewards:{name}", {})
    assert scored(made, "mine", images(2), PROMPTS[:2], [{"a": 1}] * 2).values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("brightness", {"chanel": 1}, "has no option 'chanel'. Did you mean 'channel'"),
        ("brightness", {"media": 1}, "has no option 'media'"),
        ("aimed", {}, "needs the option 'aim'"),
        ("of_images", {}, r"takes \(media\), but is called with \(media, prompts, metadata\)"),
        ("strict", {}, r"'strictness' has a default, but is given the metadata\. Write '\*' before it"),
        ("polite", {}, r"'forbidden' has a default, but is given the metadata\. Write '\*' before it"),
        ("weighted", {}, "'meta' has a default, but is given the metadata"),
        ("Templated", {}, "'template' has a default, but is given the metadata"),
        ("may_read", {"meta": "x"}, r"'meta' has a default, but is given the metadata\. Write '\*' before it"),
        ("near", {}, "'scale' has a default, but is given the references"),
        ("informed", {}, "'info' has a default, but is given the references"),
        ("OfImages", {}, r"OfImages.score' takes \(media, prompts\), but is called with \(media, prompts, metadata\)"),
        ("Cached", {}, r"Cached.score' takes \(media, prompts\), but is called with \(media, prompts, metadata\)"),
        ("NUMBER", {}, "it must be a class with score or a function, like"),
        ("Constant", {"value": 1}, "has no option 'value'"),
    ],
)
def test_what_cannot_be_called_as_a_reward_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    for check in (make_reward, check_reward):
        with pytest.raises(ConfigError, match=said):
            check(f"tests.support.rewards:{name}", options)
