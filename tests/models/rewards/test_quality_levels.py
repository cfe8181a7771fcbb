"""Five words as the next one: DeQA-Score's sum over a plain call, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlavaProcessor

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.quality_levels import LEVELS, QualityLevels
from tests.support.vlm import WORDS, write_vlm

IMAGES = np.random.default_rng(5).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)


def test_scores_are_deqas_sum_over_the_models_plain_call(tmp_path: Path) -> None:
    model = write_vlm(tmp_path)
    scores = QualityLevels(model=str(tmp_path), dtype="float32").score(IMAGES, [""] * 3, [{}] * 3)
    processor = LlavaProcessor.from_pretrained(tmp_path)
    text = "USER: <image>\nHow would you rate the quality of this image?\nASSISTANT: The quality of the image is"
    for image, value, said in zip(IMAGES, scores.values, scores.notes or (), strict=True):
        given = processor(images=Image.fromarray(image), text=text, return_tensors="pt")
        with torch.no_grad():
            logits = model(**given).logits[0, -1].double()
        powers = [float(logits[processor.tokenizer.convert_tokens_to_ids(word)].exp()) for word in LEVELS]
        wanted = sum(level * power for level, power in zip((5, 4, 3, 2, 1), powers, strict=True)) / sum(powers)
        assert value == pytest.approx(wanted, abs=1e-4)
        assert said.startswith(f"excellent {powers[0] / sum(powers):.2f}, good ")
    assert len(set(scores.values.tolist())) == 3


def test_a_beginning_that_template_and_tokenizer_write_is_read_once(tmp_path: Path) -> None:
    model = write_vlm(tmp_path, ["<bos>", *WORDS])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begin = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<bos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ bos_token }}" + template.read_text())
    reward = QualityLevels(model=str(tmp_path), dtype="float32")
    content = [{"type": "image", "image": Image.fromarray(IMAGES[0])}, {"type": "text", "text": reward.question}]
    processor = LlavaProcessor.from_pretrained(tmp_path)
    asked = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = processor.tokenizer(f" {reward.answer}", add_special_tokens=False, return_tensors="pt")["input_ids"]
    ids = torch.cat([asked["input_ids"], answer], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=asked["pixel_values"]).logits[0, -1]
    shares = logits[[processor.tokenizer.convert_tokens_to_ids(word) for word in LEVELS]].softmax(-1)
    expected = float(shares @ torch.tensor(list(LEVELS.values())))
    assert reward.score(IMAGES[:1], [""], [{}]).values[0] == pytest.approx(expected, abs=1e-4)


def test_words_that_begin_alike_are_refused(tmp_path: Path) -> None:
    write_vlm(tmp_path, [word for word in WORDS if word not in ("poor", "bad")])
    with pytest.raises(ConfigError, match="do not begin with five different tokens after the option 'answer'"):
        QualityLevels(model=str(tmp_path), dtype="float32")


def test_code_that_a_repository_brings_is_not_run(tmp_path: Path) -> None:
    """DeQA-Score's own: a configuration that transformers has no class for, with the module that has one."""
    write_vlm(tmp_path)
    classes = {"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.Model"}
    about = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mplug_owl2", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    with pytest.raises(ConfigError, match="needs code of its own"):
        QualityLevels(model=str(tmp_path), dtype="float32")
    assert not (tmp_path / "run").exists()
