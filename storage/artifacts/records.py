"""The records of a commit: shard records and artifact manifests, with their encoding and parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.errors import CorruptError
from storage.artifacts.checksummed_json import seal, unseal
from storage.backends.base import FileEntry
from storage.layout import ArtifactRef
from storage.names import digest, part

#: 2 added checksums of blocks and the artifact to shard records, 3 a checksum of the record itself; since 4 the
#: checksum of a file of several blocks is computed from theirs; 5 added a digest of the rows.
SCHEMA_VERSION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The commit record of one shard."""

    shard: str
    """Name of the shard within the artifact."""
    digest: str
    """xxh3-128 over names, sizes and checksums of the files: equal content, equal digest."""
    rows: int
    """Samples (or files, for artifacts without samples) in the shard."""
    files: tuple[FileEntry, ...]
    """The files, sorted by name."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Figures about the content, equal for equal content."""
    producer: Mapping[str, Any] = field(default_factory=dict)
    """Host, pid and timings of the writer, which may differ between equal shards."""
    artifact: str = ""
    """``kind/id`` of the artifact; absent in version 1."""
    content: str = ""
    """Digest of the rows, independent of shards; empty for artifacts that are compared by shard."""
    schema_version: int = SCHEMA_VERSION
    """Version of this record and of the files it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a complete artifact: its options, inputs and shards."""

    kind: str
    """Artifact kind."""
    id: str
    """Artifact id."""
    stage: str
    """Stage that made it."""
    stage_version: int
    """Version of the stage's semantics."""
    options: Mapping[str, Any]
    """The options that changed the result."""
    inputs: tuple[str, ...]
    """Input artifacts, ``kind/id``."""
    shards: tuple[tuple[str, str, int], ...]
    """(shard, digest, rows) of every shard in order."""
    rows: int
    """Rows in all shards."""
    size: int
    """Bytes in all shards."""
    digest: str
    """Hash over the shards' digests: the content of the artifact."""
    summary: Mapping[str, Any]
    """Figures about the whole content."""
    content: str = ""
    """Digest of all rows, independent of shards; empty if one shard has none."""
    schema_version: int = SCHEMA_VERSION
    """Version of this manifest."""


def same_content(one: Manifest, other: Manifest) -> bool:
    """Return whether two artifacts have equal content, independent of shards."""
    return one.digest == other.digest or bool(one.content and one.content == other.content)


def encode(record: ShardRecord | Manifest) -> bytes:
    """Return a record or manifest as JSON; equal objects give equal bytes."""
    return seal(asdict(record), finite=True)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return the object in a committed JSON file.

    Raises:
        CorruptError: the file is damaged, or newer than this reader.
    """
    value = unseal(data, where)
    version = value.get("schema_version", 0)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise CorruptError(
            f"{where} has schema version {version}; this flowmill reads up to {SCHEMA_VERSION}. Upgrade flowmill."
        )
    return value


def record_from(data: dict[str, Any], where: str, ref: ArtifactRef, shard: str) -> ShardRecord:
    """Return the record of a shard from its parsed JSON.

    Raises:
        CorruptError: the data are no record, or that of another shard.
    """
    try:
        files = tuple(FileEntry.parse(file) for file in data.pop("files"))
        record = ShardRecord(files=files, **data)
        digest(record.digest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{where} is not a commit record: {error}.") from None
    if record.shard != shard or record.artifact not in ("", str(ref)):
        raise CorruptError(
            f"{where} describes shard {record.shard} of {record.artifact or 'some artifact'}. It was copied from "
            "elsewhere; run 'flowmill store repair' to regenerate it."
        )
    return record


def manifest_from(data: dict[str, Any], where: str) -> Manifest:
    """Return a manifest from its parsed JSON.

    Raises:
        CorruptError: the data are no manifest.
    """
    try:
        shards = tuple((part(shard), digest(content), rows) for shard, content, rows in data.pop("shards"))
        inputs = tuple(data.pop("inputs"))
        for ref in inputs:
            ArtifactRef.parse(ref)
        return Manifest(shards=shards, inputs=inputs, **data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{where} is not a manifest: {error}.") from None
