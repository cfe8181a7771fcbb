"""Two small runs with a rollout and evaluations, made once; every test rates a copy of its store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowmill.configs.load import parse_config
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.small import small_data, write_small

#: A prompt that a page must not take as markup.
HOSTILE = "<img src=x onerror=document.title='taken'> & <b>bold</b>"


@pytest.fixture(scope="session")
def rated_store(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rated")
    data = small_data(folder, tiny_base)
    data["evaluate"] |= {"samples": 8}
    write_small(folder, data)
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in (HOSTILE, *(f'"{n:02d}"' for n in range(1, 8)))))
    context = prepare(parse_config(data, where="the small run"))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    data["run"] |= {"name": "other", "seed": 1}
    other = prepare(parse_config(data, where="another run"))
    run_epoch(other, 1)
    evaluate(other, 1)
    return folder / "store"


@pytest.fixture
def store(rated_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rated_store, tmp_path / "store"))


@pytest.fixture
def context(store: Path) -> RunContext:
    return open_run(str(store), "small", reads=True)
