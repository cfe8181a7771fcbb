"""Suggested commands open the store they are for, whatever a command opens by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.roots import default_root, root_option
from flowmill.flows.environment import existing_root
from flowmill.storage.artifacts.commit import ArtifactStore
from tests.conftest import ROOT

PRESETS = ROOT / "configs"
STORES = ("flowmill-store", "other", "../outside/a store", "s3://bucket/x")


@pytest.mark.parametrize(
    "use",
    [
        existing_root,
        ArtifactStore,
        root_option,
        lambda place: load_config(PRESETS / "tiny_sd3.yaml", [f"prompts.train={place}"]),
        lambda place: load_config(PRESETS / "tiny_sd3.yaml", [f"model.path={place}"]),
        load_config,
    ],
)
def test_a_home_folder_of_an_unknown_user_is_named(use: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="'~nosuch/x' begins with the home folder of a user that this machine"):
        use("~nosuch/x")


@pytest.mark.parametrize(("store", "default"), [*product(STORES, (None, *STORES, "s3://bucket/x/"))])
def test_the_option_opens_the_store_and_is_left_out_where_it_is_the_default(
    store: str, default: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FLOWMILL_ROOT", raising=False)
    if default is not None:
        monkeypatch.setenv("FLOWMILL_ROOT", default)
    uri = store if "://" in store else str((Path.cwd() / store).resolve())
    option = root_option(uri)
    opened = default_root(option[1] if option else None).rstrip("/")
    assert (opened if "://" in opened else str(Path(opened).resolve())) == uri
    assert (option == []) == (store == (default or "flowmill-store").rstrip("/"))
