"""Jobs for other processes: one stage of one epoch of a run, fully specified as plain data, and their session."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from flowmill.configs.errors import WorkerError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.import_paths import import_from
from flowmill.configs.load import parse_config
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.backends.checksums import hash_file
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.progress import Reporter
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage_run import StageRun

#: Prefix of a rank's output lines that contain one JSON object for the parent process.
PREFIX = "@flowmill "


@cache
def own_code() -> str:
    """Return a hash of this process's code: only processes with equal code may work on one run."""
    folder = Path(__file__).parent.parent.parent
    rooms = ("configs", "models", "storage", "tasks")
    files = [path for room in rooms for path in sorted((folder / room).rglob("*.py"))]
    return fingerprint([[str(path.relative_to(folder)), hash_file(path)] for path in files])


def version_error(run: str) -> WorkerError:
    """Return the error of a job of a run whose process has other code than this one."""
    return WorkerError(
        f"A worker on {platform.node()} runs another version of flowmill than run '{run}'. Install the same one on "
        "every machine."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One stage to run."""

    config: dict[str, Any]
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
    identities: dict[str, Any]
    """What the config names outside the run, see ``RunInputs.identities``: a worker may hold earlier files or fits."""
    number: int = 0
    """Number of earlier jobs of the ranks."""

    @classmethod
    def of(cls, run: StageRun, *, number: int = 0) -> JobSpec:
        """Return the job of a stage."""
        stage = run.stage
        config, name, epoch = settings_of(stage.context)
        return cls(
            config=config,
            run=name,
            epoch=epoch,
            node=(stage.node.epoch, stage.node.stage, stage.node.slot),
            artifact=str(run.ref),
            inputs=tuple(str(ref) for ref in stage.inputs()),
            code=own_code(),
            identities=stage.context.identities,
            number=number,
        )

    @classmethod
    def parse(cls, encoded: str) -> JobSpec:
        """Parse the text of ``encoded``; WorkerError if a version with other fields wrote it."""
        data = json.loads(encoded)
        if data.keys() != {field.name for field in fields(cls)}:
            raise version_error(str(data.get("run")))
        return cls(**{**data, "node": tuple(data["node"]), "inputs": tuple(data["inputs"])})

    def encoded(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))

    @property
    def root(self) -> str:
        """The store's root."""
        return str(self.config["store"]["root"])

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that jobs of one context share."""
        return (self.config, self.run, self.epoch, self.identities)

    def is_of(self, context: RunContext) -> bool:
        """Return whether a context has the key of this job."""
        return self.key == (*settings_of(context), context.identities)

    def parsed_config(self) -> RunConfig:
        """Return the config."""
        return parse_config(self.config, where=f"run '{self.run}'")


def settings_of(context: RunContext) -> tuple[dict[str, Any], str, int]:
    """Return the settings of a context: its config as plain data, its run and its epoch."""
    config = context.config.model_dump(mode="json")
    config["store"]["root"] = context.store.root.uri
    return config, context.run.name, context.epoch


class JobSession:
    """Session of the current job, which stays with its models for all jobs of one run."""

    def __init__(self, reporter: Callable[[], Reporter], on_open: Callable[[Session], None] = lambda session: None):
        """Start without a run.

        Args:
            reporter: makes the progress reporter of a session.
            on_open: called with a new session.
        """
        self._reporter, self._on_open = reporter, on_open
        self._job: JobSpec | None = None
        self._session: Session | None = None

    def of(self, job: JobSpec) -> Session:
        """Return the session of a job's run; a job of another run or config, or with other fits or files, releases
        the models."""
        session, previous = self._session, self._job
        if session is None or previous is None or previous.key != job.key:
            # Reset first: if the new session cannot be opened, the next try must not use the old one.
            self.close()
            session = self._opened(job)
        elif (previous.node, previous.artifact) != (job.node, job.artifact):
            session.context.refresh()
        self._session, self._job = session, job
        return session

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session, self._job = self._session, None, None
        if session is not None:
            session.close()

    def _opened(self, job: JobSpec) -> Session:
        config = job.parsed_config()
        import_from(config.execution.modules, config.execution.sources)
        run = RunFolder(ArtifactStore(config.store), job.run)
        context = RunContext(run.store, config, run, reporter=self._reporter(), epoch=job.epoch)
        context.adopt(job.identities)
        session = Session(context)
        self._on_open(session)
        return session


def run_of_job(job: JobSpec, session: Session) -> StageRun:
    """Return the stage run that a job names, with the artifacts it names."""
    stage = session.stage(Node(*job.node))
    stage.adopt(ArtifactRef.parse(job.artifact), [ArtifactRef.parse(ref) for ref in job.inputs])
    return StageRun(stage, ordered=True)
