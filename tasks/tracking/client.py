"""An MLflow client for a folder that holds both the database and the artifacts, and that can be moved.

Artifacts have ``mlflow-artifacts:`` addresses, which an MLflow server maps to its own folder. Without a server the
client maps them itself, so no absolute path enters the database and MLflow's global settings are not touched.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import requests.adapters
from mlflow import MlflowClient
from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.version import VERSION as MLFLOW_VERSION

from flowmill.configs.answers import ENCODING
from flowmill.configs.errors import TrackingError
from flowmill.configs.folders import files_below, led_to
from flowmill.configs.user_directories import user_cache
from flowmill.storage.names import below
from flowmill.tasks.tracking.locations import ARTIFACTS, database_uri, tracking_folder, tracking_uri

#: Scheme of addresses relative to the artifacts' folder.
RELATIVE = "mlflow-artifacts:"


class FolderClient(MlflowClient):
    """Logs to the SQLite file in a folder, and artifacts to the folder next to it."""

    def __init__(self, folder: Path) -> None:
        """Open the database, or create it under a temporary name first, a kill leaves no partial file."""
        self._database = database = folder / "mlflow.db"
        if not database.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _put(database, _copy_template)
        _check(database)
        uri = database_uri(database)
        super().__init__(tracking_uri=uri, registry_uri=uri)
        self._artifacts = folder / ARTIFACTS

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file to a run's artifacts."""
        self._repository(self.get_run(run_id).info.artifact_uri).log_artifact(local_path, artifact_path)

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy a folder to a run's artifacts."""
        self._copy(self.get_run(run_id).info.artifact_uri, local_dir, artifact_path)

    def list_artifacts(self, run_id: str, path: str | None = None) -> list[FileInfo]:
        """Return the entries of a folder of a run's artifacts."""
        return list(self._repository(self.get_run(run_id).info.artifact_uri).list_artifacts(path))

    def log_model_artifacts(self, model_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy a folder to a logged model's artifacts."""
        self._copy(self.get_logged_model(model_id).artifact_location, local_dir, artifact_path)

    def _copy(self, location: str, local_dir: str, artifact_path: str | None) -> None:
        repository = self._repository(location)
        # MLflow follows links to existing files, unless it copies a single one.
        for name in files_below(Path(local_dir)):
            self._check_inside(location, Path(repository.artifact_dir), f"{artifact_path or '.'}/{name}")
        repository.log_artifacts(local_dir, artifact_path)

    def _repository(self, location: str) -> LocalArtifactRepository:
        if self._artifacts.is_symlink():
            raise self._misplaced(location, f"'{self._artifacts}' is a link")
        try:
            folder = below(self._artifacts, location.removeprefix(RELATIVE).lstrip("/"))
        except ValueError as error:
            raise self._misplaced(location, str(error)) from None
        self._check_inside(location, self._artifacts, str(folder.relative_to(self._artifacts)))
        # MLflow decodes a path as if it were a URI.
        return LocalArtifactRepository(folder.absolute().as_uri())

    def _check_inside(self, location: str, folder: Path, name: str) -> None:
        if target := led_to(folder, name):
            raise self._misplaced(location, f"'{folder / name}' leads to '{target}'")

    def _misplaced(self, location: str, why: str) -> TrackingError:
        return TrackingError(
            f"'{self._database}' places artifacts at '{location}': {why}. Nothing outside '{self._artifacts}' is "
            "written. Move both away, then 'flowmill track RUN' logs every run again from committed artifacts."
        )


@contextmanager
def reaching(uri: str, label: str) -> Iterator[None]:
    """Raise a TrackingError that names ``label`` if the tracker fails inside."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise TrackingError(f"{label} could not be logged to {uri}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, without the SQL statements that follow it."""
    return str(error).partition("\n")[0]


def open_client(root: str, configured: str | None) -> MlflowClient:
    """Return the client of the configured tracking server, or by default of the store's own folder."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # This module logs the errors it raises with a traceback.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if configured is None:
        return FolderClient(tracking_folder(root))
    uri = tracking_uri(root, configured)
    # MLflow's client has no setting for the encoding of responses.
    adapters: Any = requests.adapters
    adapters.get_encoding_from_headers = lambda headers: ENCODING
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _check(database: Path) -> None:
    """Raise a TrackingError unless a database is a readable MLflow database."""
    try:
        # Not read-only: the next reader rolls back the unfinished write of a killed process.
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.DatabaseError as error:
        versions, why = [], str(error)
    else:
        why = "it says no version of its tables"
    if not versions:
        raise TrackingError(
            f"'{database}' is not a database MLflow can use: {why}. Move it away, then 'flowmill track RUN' logs every "
            "run again from committed artifacts."
        )


def _copy_template(target: Path) -> None:
    """Copy the cached empty database of this MLflow version; creating one takes a second."""
    template = user_cache() / f"mlflow-{MLFLOW_VERSION}.db"
    try:
        if not template.exists():
            template.parent.mkdir(parents=True, exist_ok=True)
            _put(template, _make_empty)
        shutil.copyfile(template, target)
        _check(target)
    except (OSError, TrackingError):
        # Without a writable home, or with a damaged cache file, this only takes longer.
        target.unlink(missing_ok=True)
        _make_empty(target)


def _make_empty(target: Path) -> None:
    SqlAlchemyStore(database_uri(target), f"{RELATIVE}/").engine.dispose()


def _put(target: Path, make: Callable[[Path], None]) -> None:
    """Make a file in a temporary folder and link it, unless another process did: a kill leaves no partial file."""
    with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=target.parent) as aside:
        new = Path(aside) / target.name
        make(new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(new, target)
