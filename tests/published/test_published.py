"""Presets and their heads say what the publications say, and name every difference, as the rendered page does."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from configs.load import load_config
from configs.registry import resolve
from models.memory.architectures import meta_denoiser
from models.memory.published import pipelines
from models.policies import POLICIES
from pages.preset_page import ABSENT, deviations, resolved, shown, sources
from tasks.checks.check import check_config
from tests.conftest import ROOT
from tools.published import PUBLISHED


def preset(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def test_every_full_size_preset_has_its_publication() -> None:
    full = {path.stem for path in (ROOT / "configs").glob("*.yaml") if load_config(path).model.path is not None}
    assert set(PUBLISHED) == full


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_equals_its_source_but_for_what_its_head_names(name: str) -> None:
    config, listed, values = load_config(preset(name)), deviations(preset(name)), PUBLISHED[name].values()
    found = {key: shown(resolved(config, key)) for key in values}
    different = {key for key, (value, _) in values.items() if found[key] != shown(value)}
    assert different == set(listed), "named in the head and not different, or different and not named"
    for key, line in listed.items():
        assert line.published == shown(values[key][0]), key
        # What no config can say is said in words; once it can, the value is due.
        assert found[key] in (line.ours, ABSENT), key


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_head_names_its_source_and_every_file_that_is_cited_has_an_address(name: str) -> None:
    publication, text = PUBLISHED[name], preset(name).read_text()
    assert set(publication.settings) <= set(publication.files)
    (source,) = (line for line in text.splitlines() if line.startswith("# source: "))
    assert publication.paper is None or f"arXiv {publication.paper}" in source
    owner = source.removeprefix("# source: ").split("; ")[-1].split()[0]
    assert any(f"github.com/{owner}/" in address for address in publication.files.values())


def test_the_page_has_every_preset_with_its_source_and_differences() -> None:
    sections = dict(part.split("\n", 1) for part in f"\n{sources()}".split("\n### ")[1:])
    assert [*sections] == [*PUBLISHED]
    for name, publication in PUBLISHED.items():
        assert all(address in sections[name] for address in publication.files.values())
        rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \| [^|]+ \| (.+) \|$", sections[name], re.MULTILINE)
        listed = deviations(preset(name))
        assert rows == [(key, line.published, line.ours, line.reason) for key, line in sorted(listed.items())]
        assert f"{len(publication.values()) - len(rows)} published settings are equal." in sections[name]


@pytest.mark.parametrize("line", ["# deviates: a 1 -> 2", "# deviates: a 1: why", "# deviates a 1 -> 2: why"])
def test_a_malformed_line_of_a_head_is_refused(tmp_path: Path, line: str) -> None:
    head = tmp_path / "mine.yaml"
    head.write_text("# deviates: a 1 -> 2: why\nmodel: {}\n")
    assert deviations(head)["a"].ours == "2"
    head.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="is not of the form"):
        deviations(head)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_full_size_preset_passes_the_check_as_it_lies_here(name: str) -> None:
    config = load_config(preset(name))
    cost = check_config(config, rewards=False)
    branches = {"flux1_tempflow": 9 * 6, "qwen_image_tempflow": 9 * 6}.get(name, 1)
    assert cost.samples_per_epoch == config.rollout.prompts_per_epoch * config.rollout.group_size * branches
    assert cost.prompts["train"] >= config.rollout.prompts_per_epoch


def test_branching_in_full_makes_the_published_number_of_images_and_calls() -> None:
    cost = check_config(load_config(preset("flux1_tempflow")), rewards=False)
    # 48 groups of 4 trunks; 6 branches at each of 9 steps, finished in 9 + 8 + ... + 1 calls.
    assert cost.samples_per_epoch == 48 * 4 * 6 * 9 == 10368
    assert cost.rollout_forwards == 48 * 4 * (10 + 6 * sum(range(1, 10)))
    assert cost.optimize_rows == 10368
    guided = check_config(load_config(preset("qwen_image_tempflow")), rewards=False)
    assert guided.rollout_forwards == 2 * cost.rollout_forwards


@pytest.mark.parametrize(
    "name", [name for name in sorted(PUBLISHED) if load_config(preset(name)).model.lora is not None]
)
def test_published_targets_are_layers_of_the_published_model(name: str) -> None:
    config = load_config(preset(name))
    assert config.model.lora is not None
    assert config.model.path is not None
    module = meta_denoiser(pipelines()[config.model.path])
    layers = [layer for layer, found in module.named_modules() if isinstance(found, torch.nn.Linear)]
    family = resolve(POLICIES, config.model.policy, label="policy")
    for target in config.model.lora.targets or family.lora_targets:
        assert any(layer.endswith(f".{target}") for layer in layers), target


def test_the_shift_dance_grpo_is_run_with_here() -> None:
    config = load_config(preset("flux1_dance"))
    tokens = (config.model.height // 16) * (config.model.width // 16)
    assert math.exp(calculate_shift(tokens)) == pytest.approx(
        float(deviations(preset("flux1_dance"))["model.options.shift"].ours), abs=5e-3
    )
