"""Suggested commands open the store they are for, whatever a command opens by itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from flowmill.configs.roots import default_root, root_option

STORES = ("flowmill-store", "other", "../outside/a store", "s3://bucket/x")


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
