"""Artifacts are made in batches of one size each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.attempt_claims import Claim, claimed

REF = ArtifactRef("rewards", "1" * 32)
OURS, THEIRS = Claim(run="a", sizes={"size": 2}), Claim(run="b", sizes={"size": 3})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def test_runs_of_equal_sizes_share_what_is_unfinished_and_others_do_not(store: ArtifactStore) -> None:
    assert claimed(store, REF, OURS) == REF
    assert claimed(store, REF, Claim(run="b", sizes=OURS.sizes)) == REF
    assert claimed(store, REF, THEIRS) == REF.attempt(2)
    assert claimed(store, REF, Claim(run="a", sizes={"size": 4})) == REF, "a run goes on with what it began"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", replace(OURS, artifact=f"rewards/{2:032d}").encoded()])
def test_a_claim_that_is_damaged_or_of_another_artifact_is_nobodys(store: ArtifactStore, content: bytes) -> None:
    assert claimed(store, REF, OURS) == REF
    path = Path(store.root.uri) / layout.claim(REF)
    path.chmod(0o600)
    path.write_bytes(content)
    assert claimed(store, REF, OURS) == REF.attempt(2)
