"""A missing artifact of any kind is named with a command that exists and makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowmill.configs.errors import NotCommittedError
from flowmill.flows.cli import app
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import KINDS, ArtifactRef


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_that_makes_an_artifact_is_named(kind: str, tmp_path: Path) -> None:
    store, ref = ArtifactStore(str(tmp_path / "store")), ArtifactRef(kind, "1" * 32)
    for state in ("does not exist", "is not complete"):
        with pytest.raises(NotCommittedError, match=rf"^{ref} {state} in '{store.root.uri}'\. ") as error:
            store.require(ref)
        commands = re.findall(r"'flowmill ([a-z ]+?)(?: RUN)?'", str(error.value))
        expected = {"preferences": ["rate", "store ls"], "reward_models": ["reward fit"]}
        assert commands == expected.get(kind, ["store repair", "run"])
        for command in commands:
            assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0
        store.root.create(layout.claim(ref), b"{}")
