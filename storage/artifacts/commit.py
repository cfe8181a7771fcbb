"""The commit protocol: create-once shard records, manifests written last, verified reads.

The files of a shard are published first, under a name that contains their digest; then its record is created
exclusively. The files of two writers of one shard therefore never mix, as the record names one set of files. Readers
only see files that a record names. Equal work gives equal bytes, so both writers of a usual race succeed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from flowmill.configs.errors import CommitLostError, CorruptError, NotCommittedError, StoreError
from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.schema import StoreSection
from flowmill.storage import layout
from flowmill.storage.artifacts.collective_publish import ProcessGroup, SingleProcess, publish
from flowmill.storage.artifacts.records import Manifest, RemovalNote, ShardRecord
from flowmill.storage.artifacts.remedies import remedy
from flowmill.storage.artifacts.row_digest import joined
from flowmill.storage.artifacts.shard_files import ShardFiles
from flowmill.storage.backends import open_backend
from flowmill.storage.backends.base import FileEntry, Root
from flowmill.storage.backends.checksums import REMEDY
from flowmill.storage.backends.disk_errors import named_disk
from flowmill.storage.layout import ArtifactRef


@dataclass(frozen=True, slots=True)
class State:
    """Progress of an artifact."""

    manifest: Manifest | None
    """Its manifest; None until it is complete."""
    committed: Sequence[str]
    """Sorted names of the committed shards; empty once it is complete."""


class ArtifactStore:
    """Commits and reads artifacts below one root."""

    def __init__(self, root: Root | StoreSection | str, *, remembers: bool = False) -> None:
        """Open a store.

        Args:
            root: a Root, the store section of a config, or the URI of a root.
            remembers: cache manifests and records, for readers that visit many of them repeatedly and remove none.
        """
        section = StoreSection(root=root) if isinstance(root, str) else root
        self._present: set[ArtifactRef] = set()
        self._remembers = remembers
        self._manifests: dict[ArtifactRef, Manifest] = {}
        self._records: dict[tuple[ArtifactRef, str], ShardRecord] = {}
        self.root: Root = open_backend(section) if isinstance(section, StoreSection) else section

    def manifest(self, ref: ArtifactRef) -> Manifest | None:
        """Return the manifest of a complete artifact, or None."""
        if ref in self._manifests:
            return self._manifests[ref]
        path = layout.manifest(ref)
        data = self.root.read(path)
        manifest = None if data is None else Manifest.decode(data, path)
        if self._remembers and manifest is not None:
            self._manifests[ref] = manifest
        return manifest

    def remember(self, refs: Iterable[ArtifactRef], *, records: bool = False) -> None:
        """Read the manifests of artifacts in one batch into the cache; a no-op in a store without one.

        Args:
            refs: the artifacts; incomplete ones are skipped.
            records: also read the records of their shards.
        """
        unknown = [ref for ref in refs if ref not in self._manifests] if self._remembers else []
        for ref, data in zip(unknown, self.root.read_many([layout.manifest(ref) for ref in unknown]), strict=True):
            if data is not None:
                self._manifests[ref] = Manifest.decode(data, layout.manifest(ref))
        if records:
            named = [(ref, shard) for ref, manifest in self._manifests.items() for shard, _, _ in manifest.shards]
            self._records |= self._read_records([each for each in named if each not in self._records])

    def require(self, ref: ArtifactRef) -> Manifest:
        """Return the manifest of an artifact that must be complete."""
        manifest = self.manifest(ref)
        if manifest is None:
            state = "is not complete" if self.root.list(ref.path) else "does not exist"
            raise NotCommittedError(f"{ref} {state} in '{self.root.uri}'. {remedy(ref)}")
        return manifest

    def record(self, ref: ArtifactRef, shard: str) -> ShardRecord | None:
        """Return the commit record of one shard, or None."""
        return self._recorded(ref, [shard])[0]

    def records(self, ref: ArtifactRef) -> list[ShardRecord]:
        """Return the records of all committed shards, sorted by shard name."""
        return self.recorded(ref, self.committed(ref))

    def recorded(self, ref: ArtifactRef, shards: Sequence[str]) -> list[ShardRecord]:
        """Return the records of the committed ones of the named shards, without listing the store."""
        return [record for record in self._recorded(ref, shards) if record is not None]

    def shards(self, ref: ArtifactRef) -> list[ShardRecord]:
        """Return exactly the records that the manifest of a complete artifact names."""
        manifest = self.require(ref)
        records = self._recorded(ref, [shard for shard, _, _ in manifest.shards])
        for (shard, digest, _), record in zip(manifest.shards, records, strict=True):
            if record is None or record.digest != digest:
                state = "is missing" if record is None else f"describes content {record.digest[:12]}"
                raise CorruptError(
                    f"{layout.record(ref, shard)} {state}; the manifest names it with content {digest[:12]}. {REMEDY}"
                )
        return [record for record in records if record is not None]

    def committed(self, ref: ArtifactRef) -> list[str]:
        """Return the sorted names of all committed shards, without reading records."""
        names = self.root.list(layout.records(ref))
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def state(self, ref: ArtifactRef) -> State:
        """Return the progress of an artifact; takes a single request if it was never begun."""
        if not self.root.list(ref.path):
            return State(None, ())
        manifest = self.manifest(ref)
        return State(manifest, () if manifest else tuple(self.committed(ref)))

    def commit(
        self,
        ref: ArtifactRef,
        shard: str,
        folder: Path,
        *,
        rows: int,
        summary: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        company: ProcessGroup | None = None,
        hashed: Sequence[FileEntry] = (),
        content: str = "",
    ) -> ShardRecord:
        """Publish a folder of finished files as one shard and create its record.

        Args:
            shard: name of the shard.
            folder: the files.
            rows: number of rows in them.
            summary: figures of the content.
            producer: writer and timings.
            company: processes that wrote the shard together; the others call ``contribute``.
            hashed: entries of files whose checksums were computed while they were written; they are not read again.
            content: digest of the rows, independent of shards.

        Returns:
            The valid record: this one, or an equal one that another writer created first.
        """
        files = self._publish(ref, shard, folder, company or SingleProcess(), hashed)
        digest = _content(files)
        record = ShardRecord(
            shard=shard,
            digest=digest,
            rows=rows,
            files=files,
            summary=summary or {},
            producer={"host": socket.gethostname(), "pid": os.getpid(), **(producer or {})},
            artifact=str(ref),
            content=content,
        )
        created = self.root.create(layout.record(ref, shard), record.encoded())
        self._present.add(ref)
        return record if created else self._settle(ref, record)

    def contribute(self, ref: ArtifactRef, shard: str, folder: Path, company: ProcessGroup) -> None:
        """Publish this process's part of a shard that rank 0 commits."""
        self._publish(ref, shard, folder, company)

    def make(
        self, ref: ArtifactRef, shard: str, write: Callable[[Path], tuple[int, Mapping[str, Any]]], **origin: Any
    ) -> Manifest:
        """Return the manifest of an artifact of one shard; missing parts are written now.

        Args:
            shard: name of its shard.
            write: writes the files into an empty folder, and returns the number of rows and figures of them.
            origin: stage, stage_version, options and inputs of the manifest.
        """
        manifest = self.manifest(ref)
        if manifest is not None:
            return manifest
        with named_disk(self.root.disk):
            record = self.record(ref, shard)
            if record is None:
                started = time.time()
                with self.root.staging() as folder:
                    rows, summary = write(folder)
                    producer = {"started": started, "seconds": round(time.time() - started, 4)}
                    record = self.commit(ref, shard, folder, rows=rows, summary=summary, producer=producer)
            return self.seal(ref, shards=[shard], summary=record.summary, **origin)

    def seal(self, ref: ArtifactRef, *, shards: Sequence[str], summary: Mapping[str, Any], **origin: Any) -> Manifest:
        """Write the manifest after every planned shard is committed.

        Args:
            shards: every planned shard, in order.
            summary: figures of the whole content.
            origin: stage, stage_version, options and inputs of the manifest.
        """
        records = self._recorded(ref, shards)
        missing = [shard for shard, record in zip(shards, records, strict=True) if record is None]
        if missing:
            raise NotCommittedError(f"{ref} cannot be completed: shards {', '.join(missing)} are not committed.")
        present = [record for record in records if record is not None]
        manifest = Manifest(
            kind=ref.kind,
            id=ref.id,
            shards=tuple((record.shard, record.digest, record.rows) for record in present),
            rows=sum(record.rows for record in present),
            size=sum(file.size for record in present for file in record.files),
            digest=_digest([[record.shard, record.digest] for record in present]),
            summary=summary,
            content=joined([record.content for record in present]),
            **origin,
        )
        if not self.root.create(layout.manifest(ref), manifest.encoded()):
            return self.require(ref)
        return manifest

    def folder(self, ref: ArtifactRef, record: ShardRecord) -> Path:
        """Return the local folder of a shard after checking sizes and, once per process, checksums."""
        self._require_files(ref)
        path, folder = layout.shard_folder(ref, record.shard, record.digest), None
        for file in record.files:
            folder = self.root.fetch(path, file).parents[file.name.count("/")]
        if folder is None:
            raise CorruptError(f"{layout.record(ref, record.shard)} names no files.")
        return folder

    def files(self, ref: ArtifactRef, record: ShardRecord) -> ShardFiles:
        """Return the files of a shard for reading single files or ranges."""
        self._require_files(ref)
        return ShardFiles(self.root, layout.shard_folder(ref, record.shard, record.digest), record.files)

    def removed(self, ref: ArtifactRef) -> bool:
        """Return whether a note says that an artifact's files were removed; a note of another artifact is ignored."""
        path = layout.removed(ref)
        data = self.root.read(path)
        try:
            return data is not None and RemovalNote.parse(data, path).place(path) == path
        except CorruptError:
            # A note exists, so the files are gone or being removed.
            return True

    def _publish(
        self, ref: ArtifactRef, shard: str, folder: Path, company: ProcessGroup, hashed: Sequence[FileEntry] = ()
    ) -> tuple[FileEntry, ...]:
        return publish(
            self.root, folder, lambda files: layout.shard_folder(ref, shard, _content(files)), company, hashed
        )

    def _require_files(self, ref: ArtifactRef) -> None:
        if ref not in self._present and self.removed(ref):
            raise NotCommittedError(
                f"The files of {ref} were removed by 'flowmill store gc' or 'repair'. Regenerate them with "
                "'flowmill stage ... --force', or restore them from a copy of the store; where something that needs "
                "them is damaged, 'flowmill store repair' regenerates both."
            )
        self._present.add(ref)

    def _recorded(self, ref: ArtifactRef, shards: Sequence[str]) -> list[ShardRecord | None]:
        read = self._read_records([(ref, shard) for shard in shards if (ref, shard) not in self._records])
        if self._remembers:
            self._records |= read
        return [read.get((ref, shard)) or self._records.get((ref, shard)) for shard in shards]

    def _read_records(self, named: Sequence[tuple[ArtifactRef, str]]) -> dict[tuple[ArtifactRef, str], ShardRecord]:
        paths = [layout.record(ref, shard) for ref, shard in named]
        return {
            each: ShardRecord.decode(data, path)
            for path, each, data in zip(paths, named, self.root.read_many(paths), strict=True)
            if data is not None
        }

    def _settle(self, ref: ArtifactRef, ours: ShardRecord) -> ShardRecord:
        winner = self.record(ref, ours.shard)
        if winner is None:
            raise StoreError(f"{layout.record(ref, ours.shard)} exists but cannot be read back.")
        if winner.digest != ours.digest:
            self.root.remove(layout.shard_folder(ref, ours.shard, ours.digest))
            raise CommitLostError(
                f"Shard {ours.shard} of {ref} was committed first by another writer with other content "
                f"(theirs {winner.digest[:12]}, ours {ours.digest[:12]}). Equal work must give equal bytes: check that "
                "both writers run the same version on the same kind of device."
            )
        return winner


def _content(files: Sequence[FileEntry]) -> str:
    return _digest([[file.name, file.size, file.xxh3] for file in files])


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(value).encode())
