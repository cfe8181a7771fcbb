"""Stored records: frozen dataclasses as JSON with a checksum, each valid at its own path only.

``Record`` is the mechanism. Shard records, manifests and notes of removals are here; lineage entries, checkpoints and
claims are next to the code that writes them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from flowmill.configs.errors import CorruptError
from flowmill.configs.validation_messages import first_error
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import REMEDY, seal, unseal
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.names import Digest, Part

#: 2 added checksums of blocks and the artifact to shard records, 3 a checksum of the record itself; since 4 the
#: checksum of a file of several blocks is computed from theirs; 5 added a digest of the rows.
SCHEMA_VERSION = 5
#: Key of a record's own path, in records whose fields do not determine it.
AT = "at"
#: Largest time or number of FLOPs of a record.
_LARGEST = 1e30
#: Keys of the records that versions without checksums wrote, by the name below the folder of a run or artifact.
_WITHOUT_CHECKSUM = {
    "run.json": ("config", "prompts"),
    "configs": ("run", "model"),
    "lineage": ("epoch", "stage", "artifact"),
    "tracking": ("mlflow_run_id",),
    "finished": ("artifacts", "made", "result"),
    "_shards": ("shard", "digest", "files"),
    "manifest.json": ("kind", "id", "shards"),
    "_removed.json": ("removed",),
    "_checkpoints": ("files",),
}
#: ``kind/id`` of an artifact.
Artifact = Annotated[str, AfterValidator(lambda text: str(ArtifactRef.parse(text)))]


def content(data: bytes, where: str) -> dict[str, Any]:
    """Return the content of the record at a path from its bytes or those of its copy."""
    name = "".join(where.split("/")[2:3]).partition("-")[0]
    value = unseal(data, where, _WITHOUT_CHECKSUM.get(name, ()))
    _check_place(where, value.pop(AT, where))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(ABC):
    """A stored record; every field is checked when it is read, and unknown ones are refused."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    noun: ClassVar[str]
    """Its name in messages."""

    @abstractmethod
    def place(self, where: str) -> str:
        """Return the path that the record belongs to; ``where`` has the names that its version lacks."""

    def encoded(self) -> bytes:
        """Return the stored form; equal records give equal bytes.

        Raises:
            ValueError: a number is not finite.
        """
        return seal(asdict(self), finite=True)

    @classmethod
    def parse(cls, data: bytes, where: str) -> Self:
        """Return the record in the bytes at a path, which may be that of another path."""
        value = content(data, where)
        version = value.get("schema_version", 0)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise CorruptError(
                f"{where} has schema version {version}; this version reads up to {SCHEMA_VERSION}. Upgrade flowmill."
            )
        try:
            record: Self = _reader(cls).validate_python(value)
        except ValidationError as error:
            raise CorruptError(f"{where} is not {cls.noun}: {first_error(error)}.") from None
        return record

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Return the record at a path."""
        record = cls.parse(data, where)
        _check_place(where, record.place(where))
        return record


@cache
def _reader(kind: type[Record]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _check_place(where: str, place: str) -> None:
    if place != where:
        raise CorruptError(f"{where} is the record of {place}: it was copied from elsewhere. {REMEDY}")


def _timed(producer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of a writer after checking that those that are counted with are numbers."""
    for name in ("started", "seconds", "model_seconds", "model_flops", "peak_flops"):
        value = producer.get(name, 0)
        if not (isinstance(value, int | float) and abs(value) <= _LARGEST):
            raise ValueError(f"'{name}' is no number, or out of range")
    return producer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord(Record):
    """The commit record of one shard."""

    noun = "a commit record"

    shard: Part
    """Name of the shard within the artifact."""
    digest: Digest
    """xxh3-128 over names, sizes and checksums of the files: equal content, equal digest."""
    rows: int
    """Samples (or files, for artifacts without samples) in the shard."""
    files: tuple[FileEntry, ...]
    """The files, sorted by name."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the content, equal for equal content."""
    producer: Annotated[Mapping[str, Any], AfterValidator(_timed)] = field(default_factory=dict)
    """Host, pid and timings of the writer, which may differ between equal shards."""
    artifact: Artifact = ""
    """``kind/id`` of the artifact; absent in version 1."""
    content: str = ""
    """Digest of the rows, independent of shards; empty for artifacts that are compared by shard."""
    schema_version: int = SCHEMA_VERSION
    """Version of this record and of the files it names."""

    def place(self, where: str) -> str:
        """Return the path of the commit record."""
        return layout.record(_artifact(self.artifact, where), self.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """Description of a complete artifact: its options, inputs and shards."""

    noun = "a manifest"

    kind: str
    """Artifact kind."""
    id: str
    """Artifact id."""
    stage: str
    """Stage that created it."""
    stage_version: int
    """Version of the stage's semantics."""
    options: Mapping[str, Any]
    """The options that changed the result."""
    inputs: tuple[Artifact, ...]
    """Input artifacts, ``kind/id``."""
    shards: tuple[tuple[Part, Digest, int], ...]
    """(shard, digest, rows) of every shard in order."""
    rows: int
    """Rows in all shards."""
    size: int
    """Bytes in all shards."""
    digest: str
    """Hash over the shards' digests: the content of the artifact."""
    summary: Mapping[str, Any]
    """Figures of the whole content."""
    content: str = ""
    """Digest of all rows, independent of shards; empty if one shard has none."""
    schema_version: int = SCHEMA_VERSION
    """Version of this manifest."""

    def place(self, where: str) -> str:
        """Return the path of the manifest."""
        return layout.manifest(ArtifactRef(self.kind, self.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalNote(Record):
    """A note that the files of an artifact were removed on purpose, leaving its records and manifest."""

    noun = "a note of a removal"

    artifact: Artifact = ""
    """``kind/id`` of the artifact; absent before version 0.3.0."""
    removed: float
    """Seconds since 1970."""
    reason: str
    """Reason for the removal."""

    def place(self, where: str) -> str:
        """Return the path of the note."""
        return layout.removed(_artifact(self.artifact, where))


def removal_note(ref: ArtifactRef, reason: str) -> bytes:
    """Return the stored note that an artifact's files were removed now."""
    return RemovalNote(artifact=str(ref), removed=time.time(), reason=reason).encoded()


def _artifact(named: str, where: str) -> ArtifactRef:
    """Return the artifact that a record names, or that of its path."""
    return ArtifactRef.parse(named) if named else ArtifactRef(*where.split("/")[:2])


def same_content(one: Manifest, other: Manifest) -> bool:
    """Return whether two artifacts have equal content, independent of shards."""
    return one.digest == other.digest or bool(one.content and one.content == other.content)
