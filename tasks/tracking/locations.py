"""Locations of tracked runs; imports no MLflow."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from flowmill.configs.fingerprint import hash_text
from flowmill.configs.user_directories import user_state

#: Name of the folder with images, configs and models, next to the database.
ARTIFACTS = "mlflow-artifacts"
#: Without it MLflow may open in the view of language model applications.
_KIND = "workflowType=machine_learning"
#: Default address of MLflow in 'flowmill ui'.
UI_ADDRESS = "http://127.0.0.1:5000"
_LOOPBACK = re.compile(r"http://127\.0\.0\.1:\d{1,5}")
#: Artifact name of a run's report in its MLflow run.
REPORT = "report.html"


def tracking_uri(root: str, configured: str | None) -> str:
    """Return the configured tracking URI, or that of the SQLite file in ``tracking_folder``."""
    return configured or database_uri(tracking_folder(root) / "mlflow.db")


def database_uri(file: Path) -> str:
    """Return the tracking URI of an SQLite file, whose path may have characters that mean something in a URI."""
    # SQLAlchemy would read what follows a question mark as options, and decodes nothing.
    return f"sqlite:///file:{quote(str(file))}?uri=true" if "?" in str(file) else f"sqlite:///{file}"


def tracking_folder(root: str) -> Path:
    """Return the folder of MLflow's files when no tracking URI is configured.

    It is the store itself, or ./flowmill-tracking for a store that is not a local folder.
    """
    return Path.cwd() / "flowmill-tracking" if "://" in root else Path(root)


@contextmanager
def served_at(root: str, address: str) -> Iterator[None]:
    """Note the address that serves a store's MLflow while inside, so that links on this machine use it."""
    note = _note_of(root)
    # If the note cannot be written, links use the default address.
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(address)
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def ui_page(root: str, path: str) -> str:
    """Return the URL of a page of a store's MLflow at the current or the default address of 'flowmill ui'."""
    try:
        address = _note_of(root).read_text()
    except (OSError, UnicodeDecodeError):
        address = ""
    return f"{address if _LOOPBACK.fullmatch(address) else UI_ADDRESS}{path}"


def _note_of(root: str) -> Path:
    place = root if "://" in root else str(Path(root).absolute())
    return user_state() / "ui" / hash_text(place)[:16]


def runs_page(root: str) -> str:
    """Return the path, below MLflow's address, of the list of a store's runs."""
    database = tracking_folder(root) / "mlflow.db"
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT experiment_id FROM runs ORDER BY start_time DESC LIMIT 1").fetchone()
    except sqlite3.Error:
        # No run is tracked yet.
        row = None
    if row is None:
        return f"/#/experiments?{_KIND}"
    return f"/#/experiments/{row[0]}/runs?{_KIND}"
