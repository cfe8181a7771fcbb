"""The layout of a store; all paths inside a store are defined here.

<root>/<kind>/<id>/<shard>-<digest>/...   the files of one shard
<root>/<kind>/<id>/_shards/<shard>.json   its commit record; without it the files are ignored
<root>/<kind>/<id>/manifest.json          written last; the artifact is complete
<root>/<kind>/<id>/_claim.json            the run that makes it, and its batch sizes
<root>/runs/<run>/...                     config, lineage and tracking ids of a run
<root>/runs/<run>/copies/...              copies of these records, to restore lost ones
<root>/fits/<name>/...                    the fitted rewards of a name, one record each
<root>/quarantine/<kind>/<id>/...         damaged files, for inspection
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_ID = re.compile(r"\w[\w.-]*")
_DIGITS = 12
KINDS = (
    "bases",
    "prompts",
    "embeddings",
    "choices",
    "trajectories",
    "renders",
    "rewards",
    "values",
    "gradients",
    "advantages",
    "policies",
    "decisions",
    "evaluations",
    "losses",
    "exports",
    "preferences",
    "reward_models",
)
STAGING = ".staging"
RUNS = "runs"
FITS = "fits"
LINEAGE = "lineage"
QUARANTINE = "quarantine"
PARTS = "parts"
COPIES = "copies"
_MANIFEST = "manifest.json"
_CHECKPOINTS = "_checkpoints"
_SHARDS = "_shards"
_REMOVED = "_removed.json"
_CLAIM = "_claim.json"
_SHARD_FOLDER = rf"[^/]+-[0-9a-f]{{{_DIGITS}}}"
_OF_ARTIFACT = re.compile(rf"{_MANIFEST}|{_SHARDS}|{_REMOVED}|{_CLAIM}|{_CHECKPOINTS}|{_SHARD_FOLDER}")
_FILE = re.compile(
    rf"({QUARANTINE}/)?({'|'.join(KINDS)})/{_ID.pattern}/({_SHARD_FOLDER}|{_CHECKPOINTS}/[^/]+)/.+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, order=True)
class ArtifactRef:
    """Names one artifact: its kind and fingerprint (plus ``-aN`` for the Nth forced attempt)."""

    kind: str
    id: str

    @property
    def path(self) -> str:
        """Folder of the artifact below the root."""
        return f"{self.kind}/{self.id}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint without the attempt."""
        return self.id.partition("-a")[0]

    @property
    def number(self) -> int:
        """Number of the attempt at the work, from 1."""
        _, _, number = self.id.partition("-a")
        return int(number) if number.isdigit() else 1

    def attempt(self, number: int) -> ArtifactRef:
        """Return the ref of another attempt at the same work; attempt 1 has no suffix."""
        return ArtifactRef(self.kind, self.fingerprint if number == 1 else f"{self.fingerprint}-a{number}")

    def __str__(self) -> str:
        return self.path

    @staticmethod
    @lru_cache(maxsize=1 << 16)
    def parse(text: str) -> ArtifactRef:
        """Return the ref spelled ``kind/id``.

        Raises:
            ValueError: the text does not have that form or the kind does not exist.
        """
        if not is_artifact(text):
            raise ValueError(f"'{text}' is not an artifact; artifacts are kind/id with kind one of {', '.join(KINDS)}")
        kind, _, identifier = text.partition("/")
        return ArtifactRef(kind, identifier)


def is_artifact(text: str) -> bool:
    """Return whether a text has the form ``kind/id``."""
    kind, _, identifier = text.partition("/")
    return kind in KINDS and _ID.fullmatch(identifier) is not None


def manifest(ref: ArtifactRef) -> str:
    """Path of the manifest."""
    return f"{ref.path}/{_MANIFEST}"


def records(ref: ArtifactRef) -> str:
    """Folder of the commit records."""
    return f"{ref.path}/{_SHARDS}"


def record(ref: ArtifactRef, shard: str) -> str:
    """Path of one commit record."""
    return f"{records(ref)}/{shard}.json"


def removed(ref: ArtifactRef) -> str:
    """Path of the note that an artifact's files were removed on purpose."""
    return f"{ref.path}/{_REMOVED}"


def claim(ref: ArtifactRef) -> str:
    """Path of the note with the run that makes an artifact, and its batch sizes."""
    return f"{ref.path}/{_CLAIM}"


def shard_folder(ref: ArtifactRef, shard: str, digest: str) -> str:
    """Folder of one shard's files; the content digest in its name separates different contents."""
    return f"{ref.path}/{shard}-{digest[:_DIGITS]}"


def is_file(path: str) -> bool:
    """Return whether a path below the root has the form of a published file."""
    return _FILE.fullmatch(path) is not None


def holds_files(name: str) -> bool:
    """Return whether a name directly below an artifact is a folder with files of a shard."""
    return not name.startswith("_") and name != _MANIFEST


def is_of_artifact(name: str) -> bool:
    """Return whether a name directly below a folder is one that flowmill writes there, if it is that of an artifact."""
    return _OF_ARTIFACT.fullmatch(name) is not None


def part_folder(number: int) -> str:
    """Folder, within a shard, with the part of one of several processes."""
    return f"{PARTS}/{number:05d}"


def checkpoints(ref: ArtifactRef) -> str:
    """Folder of the transient optimizer checkpoints of a policy during training."""
    return f"{ref.path}/{_CHECKPOINTS}"


def run(name: str) -> str:
    """Folder of a run."""
    return f"{RUNS}/{name}"


def lock(name: str = "") -> str:
    """Path of the lock of a run, or of the whole store, which a process that removes files holds."""
    return f"{run(name)}/.lock" if name else f"{RUNS}/.lock"


def run_record(name: str) -> str:
    """Path of the run's first record: config, seed, identity."""
    return f"{run(name)}/run.json"


def run_series(name: str, series: str, number: int) -> str:
    """Path of one of a run's numbered records: the configs it was started with, its trackers."""
    return f"{run(name)}/{series}/{number:04d}.json"


def lineage(name: str) -> str:
    """Folder of the run's lineage records."""
    return f"{run(name)}/{LINEAGE}"


def lineage_entry(name: str, epoch: int, stage: str, slot: str, number: int) -> str:
    """Path of one lineage record."""
    return f"{lineage(name)}/{epoch:05d}.{stage}.{slot or '-'}.{number:03d}.json"


def fits(name: str) -> str:
    """Folder of the records of the fits under a name."""
    return f"{FITS}/{name}"


def fit(name: str, number: int) -> str:
    """Path of the record of one of them, from 1."""
    return f"{fits(name)}/{number:04d}.json"


def copies(name: str) -> str:
    """Folder of the copies of a run's records."""
    return f"{run(name)}/{COPIES}"


def copy_of(path: str) -> str:
    """Path of the copy of a run's record."""
    runs, name, rest = path.split("/", 2)
    return f"{runs}/{name}/{COPIES}/{rest}"


def record_of(path: str) -> str:
    """Path of the record of its own path or that of its copy."""
    runs, name, rest = path.split("/", 2)
    return f"{runs}/{name}/{rest.removeprefix(f'{COPIES}/')}"


def is_record(path: str, top: str) -> bool:
    """Return whether a path below the folder of a run, or of its copies, is that of a record."""
    first, *more = path.removeprefix(f"{top}/").removesuffix(".json").split("/")
    return path.endswith(".json") and first != COPIES and ((not more and first == "run") or len(more) == 1)
