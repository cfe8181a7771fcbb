"""Tiny pipelines of a table of configs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import families
from flowmill.models.library_loading import read_json
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart.tiny import build_tiny

TABLE = yaml.safe_load(files("flowmill.models.quickstart").joinpath("tiny.yaml").read_text())


def test_the_table_has_every_family_of_denoisers() -> None:
    assert set(TABLE) - {"shared"} == set(POLICIES) - set(families(lambda spec: spec.kind != "diffusion"))


def test_equal_seeds_give_equal_weights_and_the_global_generator_stays() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (build_tiny("sd3", seed).transformer.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_numbers_of_a_tokenizer_and_repeated_values_are_written_in_full() -> None:
    made = build_tiny("wan22_ti2v")
    assert made.text_encoder.config.vocab_size == len(made.tokenizer)
    assert made.text_encoder.config.eos_token_id == made.tokenizer.eos_token_id
    assert list(made.vae.config.latents_std) == [1.0] * 48
    assert not [name for name in made.components if name.startswith("unused")]


def test_a_part_that_is_drawn_and_dropped_moves_the_weights_that_follow() -> None:
    text, image = build_tiny("wan21"), build_tiny("wan22_i2v")
    same, other = "blocks.0.ffn.net.0.proj.weight", "text_encoder"
    assert torch.equal(*(next(getattr(each, other).parameters()) for each in (text, image)))
    assert not torch.equal(*(each.transformer.state_dict()[same] for each in (text, image)))


def test_changes_replace_fields_of_a_part() -> None:
    changes = {"transformer": {"num_layers": 3}, "scheduler": {"shift": 2.0}}
    made = build_tiny("sd3", changes=changes)
    assert (len(made.transformer.transformer_blocks), made.scheduler.config.shift) == (3, 2.0)
    assert len(build_tiny("sd3").transformer.transformer_blocks) == 2


@pytest.mark.parametrize(
    ("family", "index", "part", "entry"),
    [
        ("qwen_image_edit", "model_index.json", "processor", ["transformers", "Qwen2VLProcessor"]),
        ("flux3", "modular_model_index.json", "tokenizer", ["transformers", "Qwen3VLProcessor"]),
    ],
)
def test_processors_are_written_with_the_tokenizer_and_listed(
    tmp_path: Path, family: str, index: str, part: str, entry: list[str]
) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    assert read_json(tmp_path / index)[part][:2] == entry
    assert {"preprocessor_config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / part).iterdir()}


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no tiny pipeline of 'wan12'.*'wan21'"):
        build_tiny("wan12")
