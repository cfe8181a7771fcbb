"""Every preset, loaded once: it survives a round trip and a copy, and says the same as its publication."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config, parse_config
from flowmill.configs.presets import copy_preset, presets
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import meta_denoiser
from flowmill.models.memory.published import pipelines
from flowmill.models.policies import POLICIES, folder_policy
from flowmill.models.policies.folder_policy import FolderPolicy
from flowmill.models.policies.nan_checks import noise_levels
from flowmill.models.policies.parts import Part
from flowmill.models.weights.stored_weights import empty_model
from flowmill.tasks.checks import check
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.components import make_algorithm
from flowmill.tasks.inputs.model_settings import check_model
from flowmill.tasks.inputs.renderer import renderer_config
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.trained_weights import check_trained
from flowmill.tasks.specs.plan import RunPlan
from pages.preset_page import ABSENT, deviations, resolved, shown
from tests.conftest import ROOT
from tests.support.published_components import published_folder
from tools.published import PUBLISHED


def denoising(config: RunConfig) -> RunConfig:
    """Return the config of the model of a preset that denoises."""
    return config if config.render is None else renderer_config(config)


#: Presets by the published pipeline that they train, or draw with.
PIPELINE_PRESETS: dict[str, list[str]] = {}
for _name in PUBLISHED:
    if (_path := denoising(load_config(_name)).model.path) in pipelines():
        PIPELINE_PRESETS.setdefault(str(_path), []).append(_name)


@pytest.mark.parametrize("name", presets())
def test_a_preset(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.run.name == name
    assert parse_config(yaml.safe_load(config.to_yaml()), where="dump") == config
    given = [] if config.data is None else [config.data.train]
    lists = [*given, *config.prompts.lists("train").values()]
    assert lists
    assert all(Path(each).is_absolute() for each in lists)
    check_copy(name, config, tmp_path)
    # Every preset of a full-size model has a publication.
    assert (name in PUBLISHED) == (config.model.path is not None)
    if name in PUBLISHED:
        check_values(name, config)
        check_head(name)
        check_cost(name, config)
        check_targets(config)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(PIPELINE_PRESETS))
def test_presets_run_on_the_components_as_published(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of a downloaded folder pass, and its scheduler leads through every number of steps."""
    # The folder has no weights of these sizes.
    monkeypatch.setattr(FolderPolicy, "check_weights", lambda folder: None)
    # What presets of one model train alike is made once: adapters of published sizes take a second.
    trained: set[str] = set()

    def check_once(plan: ResolvedConfig) -> None:
        key = repr((plan.config.model, plan.requires.critic))
        if key not in trained:
            check_trained(plan)
            trained.add(key)

    monkeypatch.setattr(check, "check_trained", check_once)
    first = denoising(load_config(PIPELINE_PRESETS[model][0]))
    published_folder(model, first.model.policy, tmp_path)
    # Presets of one model differ in guidance and size, which its empty denoisers do not depend on: embeddings of
    # published sizes take ten seconds to compute.
    emptied: dict[str, torch.nn.Module] = {}

    def empty_once(make: partial[torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
        key = repr((make.func, make.args, dtype))
        if key not in emptied:
            emptied[key] = empty_model(make, dtype)
        return emptied[key]

    monkeypatch.setattr(folder_policy, "empty_model", empty_once)
    for name in PIPELINE_PRESETS[model]:
        config = load_config(name)
        drawn = denoising(config)
        local = drawn.model_copy(update={"model": drawn.model.model_copy(update={"path": str(tmp_path)})})
        check_model(RunPlan(local))
        if drawn is config:
            check_config(local, rewards=False)
        family = resolve(POLICIES, drawn.model.policy, label="policy")
        settings = family.settings_for(local, dtype=torch.float32, device=torch.device("cpu"), empty=True)
        policy = family.load(tmp_path, settings, frozenset({Part.DENOISER}), drawn.model.options)
        for steps in {drawn.rollout.steps, drawn.evaluate.steps or drawn.rollout.steps}:
            assert len(noise_levels(policy, steps)) == steps + 1, name
        times = make_algorithm(config).requires.times
        if times is not None and times.kind == "timesteps":
            assert len(family.trained_levels(tmp_path)) == 1000, name


def check_copy(name: str, config: RunConfig, folder: Path) -> None:
    """Check that a copied preset is the same config, with prompt lists of its own that exist."""
    copy, *_ = copy_preset(name, folder)
    ours, theirs = (each.model_dump(mode="json") for each in (config, load_config(copy)))
    for section in (ours["prompts"], theirs["prompts"]):
        lists = (section, *section["sources"])
        found = [each.pop(split) for each in lists for split in ("train", "heldout") if each[split]]
        assert found or ours["data"]
        assert all(Path(file).is_file() for file in found), found
    for each in (ours, theirs):
        for section, key in ((each["data"], "train"), (each["model"], "start_config")):
            assert section is None or section[key] is None or Path(section.pop(key)).is_file()
    assert ours == theirs
    assert copy_preset(name, folder)[0] == copy, "again"
    copy.write_text("run: {}")
    with pytest.raises(ConfigError, match="exists and is another file"):
        copy_preset(name, folder)


def check_values(name: str, config: RunConfig) -> None:
    """Check that a preset equals its source except for the differences that its head names."""
    listed, values = deviations(ROOT / "configs" / f"{name}.yaml"), PUBLISHED[name].values()
    found = {key: shown(resolved(config, key)) for key in values}
    different = {key for key, (value, _) in values.items() if found[key] != shown(value)}
    assert different == set(listed), "named in the head and not different, or different and not named"
    for key, line in listed.items():
        assert line.published == shown(values[key][0]), key
        # The head says in words what no config can express; once it can, the value is due.
        assert found[key] in (line.ours, ABSENT), key


def check_head(name: str) -> None:
    """Check that a head names its source, and that every cited file has an address."""
    publication, text = PUBLISHED[name], (ROOT / "configs" / f"{name}.yaml").read_text()
    assert set(publication.settings) <= set(publication.files)
    (source,) = (line for line in text.splitlines() if line.startswith("# source: "))
    assert publication.paper is None or f"arXiv {publication.paper}" in source
    owner = source.removeprefix("# source: ").split("; ")[-1].split()[0]
    assert any(f"github.com/{owner}/" in address for address in publication.files.values())


def check_cost(name: str, config: RunConfig) -> None:
    """Check that a preset passes the check as it lies here, with the samples of its groups."""
    cost = check_config(config, rewards=False)
    if config.data is not None:
        rows = len(Path(config.data.train).read_text().splitlines())
        assert cost.samples_per_epoch == rows * (2 if config.data.paired else 1)
        return
    branches = {"flux1_tempflow": 9 * 6, "qwen_image_tempflow": 9 * 6}.get(name, 1)
    assert cost.samples_per_epoch == config.rollout.prompts_per_epoch * config.rollout.group_size * branches
    assert cost.prompts["train"] >= config.rollout.prompts_per_epoch


@cache
def linear_layers(model: str) -> tuple[str, ...]:
    """Return the names of the linear layers of a published model."""
    modules = meta_denoiser(pipelines()[model]).named_modules()
    return tuple(layer for layer, found in modules if isinstance(found, torch.nn.Linear))


def check_targets(config: RunConfig) -> None:
    """Check that the targets of adapters are layers of the published model."""
    if config.model.lora is None:
        return
    family = resolve(POLICIES, config.model.policy, label="policy")
    for target in config.model.lora.targets or family.lora_targets:
        assert any(layer.endswith(f".{target}") for layer in linear_layers(str(config.model.path))), target
