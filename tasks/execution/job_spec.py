"""Jobs for other processes: one stage of one epoch of a run, fully specified as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.fingerprint import fingerprint
from configs.load import parse_config
from configs.schema import RunConfig
from storage.backends.checksums import hash_file
from tasks.stages.stage_run import StageRun

#: Prefix of a rank's output lines that contain one JSON object for the parent process.
PREFIX = "@flowmill "


@cache
def own_code() -> str:
    """Return a hash of this process's code: only processes with equal code may work on one run."""
    folder = Path(__file__).parent.parent.parent
    rooms = ("configs", "models", "storage", "tasks")
    files = [path for room in rooms for path in sorted((folder / room).rglob("*.py"))]
    return fingerprint([[str(path.relative_to(folder)), hash_file(path)] for path in files])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One stage to run."""

    config: Mapping[str, Any]
    """The run's config, or another config for this stage."""
    run: str
    """Name of the run."""
    epoch: int
    """Epoch of the stage if it has another config; 0 with the run's own config."""
    node: tuple[int, str, str]
    """The stage."""
    artifact: str
    """The artifact it makes."""
    inputs: tuple[str, ...]
    """The artifacts it reads."""
    code: str
    """Hash of the sender's code, see ``own_code``."""
    number: int = 0
    """Number of jobs given to the ranks before."""

    @classmethod
    def of(cls, run: StageRun, *, number: int = 0) -> JobSpec:
        """Return the job of a stage."""
        stage, context = run.stage, run.stage.context
        config = context.config.model_dump(mode="json")
        config["store"]["root"] = run.store.root.uri
        return cls(
            config=config,
            run=context.run.name,
            epoch=context.epoch,
            node=(stage.node.epoch, stage.node.stage, stage.node.slot),
            artifact=str(run.ref),
            inputs=tuple(str(ref) for ref in stage.inputs()),
            code=own_code(),
            number=number,
        )

    @classmethod
    def parse(cls, line: str) -> JobSpec:
        """Parse the text of ``line``."""
        data = json.loads(line)
        return cls(**{**data, "node": tuple(data["node"]), "inputs": tuple(data["inputs"])})

    def line(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))

    @property
    def root(self) -> str:
        """The store's root."""
        return str(self.config["store"]["root"])

    @property
    def settings(self) -> tuple[object, ...]:
        """The key that jobs of one context share."""
        return (self.config, self.run, self.epoch)

    def parsed_config(self) -> RunConfig:
        """Return the config."""
        return parse_config(dict(self.config), where=f"run '{self.run}'")
