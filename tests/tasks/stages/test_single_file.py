"""Runs that start from a single file of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config, parse_config
from flowmill.models.library_loading import quiet_libraries
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import changed_files
from flowmill.tasks.runs.opening import open_run
from tests.conftest import ConfigFactory
from tests.support.inside import prepare, run_epoch, run_stage
from tests.support.language_models import texts_data
from tests.support.single_files import before, sd3_transformer, single_file, state

FEW = ("rollout.prompts_per_epoch=1", "rollout.group_size=2")


def written(base: Path, path: Path, *, factor: float = 1.0) -> Path:
    """Write the transformer of a folder as a single file, its last layer times a factor."""
    quiet_libraries()
    tensors = state(SD3Transformer2DModel.from_pretrained(base / "transformer"))
    tensors["proj_out.weight"] = tensors["proj_out.weight"] * factor
    return single_file(before("model.diffusion_model.", sd3_transformer(tensors)), path)


@pytest.mark.slow
def test_a_run_starts_from_a_file_and_its_content_alone_is_part_of_what_the_base_is(
    make_config: ConfigFactory, tiny_base: Path, tmp_path: Path
) -> None:
    file = written(tiny_base, tmp_path / "tuned.safetensors", factor=2.0)
    config = make_config(f"model.single_file={file}", "model.lora={rank: 2}", *FEW)
    check_config(config)
    context = prepare(config)
    ours, own = (
        load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        for folder in (context.base_folder, tiny_base)
    )
    assert ours.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(ours[name], tensor * (2 if name == "proj_out.weight" else 1))
    run_epoch(context, 1)
    run_stage(context, "export", 1)
    export = context.chain.require(1, "export").ref
    folder = context.store.folder(export, context.store.shards(export)[0]) / "pipeline"
    base, card = context.chain.require(0, "base").ref, (folder / "README.md").read_text()
    assert "`tuned`, a local file" in card
    assert f"`tuned` is the folder of the base model; it is `pipeline` in the store's artifact `{base}`" in card
    assert json.loads((folder / "generation.json").read_text())["base_model"] == "tuned"
    # Elsewhere and by another name it is the same model; with other bytes it is another.
    moved = file.rename(tmp_path / "moved.safetensors")
    again = prepare(make_config("run.name=again", f"model.single_file={moved}", *FEW))
    assert again.chain.require(0, "base").ref == base
    assert prepare(make_config("run.name=plain", *FEW)).chain.require(0, "base").ref != base
    # Gone: what was made is read on.
    held = open_run(context.store.root.uri, "small", reads=True)
    assert held.base_folder == context.base_folder
    assert held.policy_ref(1) == context.policy_ref(1)
    written(tiny_base, moved, factor=3.0)
    other = prepare(make_config("run.name=other", f"model.single_file={moved}", *FEW))
    assert other.chain.require(0, "base").ref != base
    with pytest.raises(ConfigError, match=r"model\.single_file: there is no file"):
        prepare(make_config("run.name=gone", f"model.single_file={file}", *FEW))


def test_files_by_component_are_found_beside_the_config(
    config_file: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tiny_base, tmp_path / "tuned.safetensors")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(config_file, ["model.single_file={transformer: tuned.safetensors}"])
    assert config.model.single_file == {"transformer": str(tmp_path / "tuned.safetensors")}
    assert config.model.base_name == "tuned"
    check_config(config)
    assert changed_files(config.model) == []


def test_what_cannot_start_a_run_is_refused_before_anything_runs(
    make_config: ConfigFactory, tiny_base: Path, tmp_path: Path
) -> None:
    file = written(tiny_base, tmp_path / "tuned.safetensors")
    for value, message in {
        str(tmp_path / "other.safetensors"): r"model\.single_file: .* is no safetensors file",
        f"{{vae: {file}}}": "is no AutoencoderKL as vae|holds no AutoencoderKL, or diffusers converts none",
        f"{{transfromer: {file}}}": r"is for transfromer, which model.path .* lacks",
        "{}": "single_file is a file of weights.*needs 'path'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_config(make_config(f"model.single_file={value}"))
    with pytest.raises(ConfigError, match="needs 'path'"):
        make_config(f"model.single_file={file}", "model.path=null", "model.build={name: digits}")
    data = texts_data(tmp_path)
    data["model"]["single_file"] = str(file)
    with pytest.raises(ConfigError, match=r"model\.single_file: CausalLM reads no single files"):
        check_config(parse_config(data, where="here"))
