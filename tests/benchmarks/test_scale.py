"""The benchmark of scale carries out stages with stubs in place of models, and they fit the stages."""

from __future__ import annotations

from pathlib import Path

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import list_runs
from tools.benchmarks import scale


def test_every_operation_works_on_its_store(tmp_path: Path) -> None:
    epoch = scale.operations(str(tmp_path / "epoch"), 40, 2)
    for name in scale.EPOCH:
        epoch[name.removeprefix("*")]()
    assert not list_runs(ArtifactStore(str(tmp_path / "epoch")))

    runs = scale.operations(str(tmp_path / "runs"), 40, 2)
    runs["add"](0, 2)
    for name in scale.RUNS:
        runs[name]()
    assert list_runs(ArtifactStore(str(tmp_path / "runs"))) == ["r0"]
