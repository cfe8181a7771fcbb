"""Miniatures of model families: their folders, and the section of a config that names one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import make_config
from flowmill.configs.presets import presets
from flowmill.flows.cli.app import app
from flowmill.models.quickstart import tiny_families


def test_every_family_has_a_preset_with_its_settings() -> None:
    assert {f"tiny_{family}" for family in tiny_families()} <= {*presets()}


def test_a_folder_is_made_once_and_the_printed_section_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    done = CliRunner().invoke(app, ["tiny", "sd3", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    assert (folder / "model_index.json").is_file()
    section = yaml.safe_load(done.stdout.splitlines()[-1])
    rest = {"prompts": {"train": ["a"]}, "rewards": ["jpeg_compressibility"]}
    config = make_config({**section, **rest}, where="it", name="n", folder=tmp_path)
    assert (config.model.policy, config.model.path, config.model.height) == ("sd3", str(folder), 64)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        CliRunner().invoke(app, ["tiny", "sd3", str(folder)], catch_exceptions=False)


def test_an_unknown_family_names_its_neighbor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tiny model of family 'flux'\. Did you mean 'flux1'"):
        CliRunner().invoke(app, ["tiny", "flux", str(tmp_path / "x")], catch_exceptions=False)
    assert not (tmp_path / "x").exists()
