"""Requests to one prefix of an S3 bucket through s3fs: retried, range-exact, with verified conditional puts.

Some servers silently ignore the condition of a put, so each process tests it once before its first commit. Even more
servers ignore it on multipart completion, which is therefore never conditional.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from flowmill.configs.errors import CorruptError, StoreError
from flowmill.storage.backends.connection import (
    DENIED,
    UNREACHED,
    AccessRefusedError,
    check_bucket,
    connection,
    refusal,
    server,
    status_of,
)
from flowmill.storage.backends.obstore_client import LARGEST, LEAST, Quick
from flowmill.storage.backends.process_tags import tag
from flowmill.storage.layout import is_file

_Result = TypeVar("_Result")
#: Attempts of the client and of ``_steady``, and seconds after which the latter makes no other.
_ATTEMPTS, _PATIENCE_S = 6, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A paginated call that lists part of a bucket."""

    call: str
    """Name of the operation."""
    tokens: Mapping[str, str]
    """Arguments of the next call, each with the field of the answer that provides it."""


_OBJECTS = Listing(call="list_objects_v2", tokens={"ContinuationToken": "NextContinuationToken"})
_UPLOADS = Listing(
    call="list_multipart_uploads", tokens={"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
)

#: Results of the probe by URI, one probe per process.
_conditional: dict[str, bool] = {}
_probe_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMetadata:
    """Version, age and size of an object."""

    version: str
    """Its ETag."""
    age_s: float
    """Seconds since it was written, by the server's clock."""
    size: int
    """Bytes."""


class Bucket:
    """Objects below ``s3://bucket/prefix``; endpoint and credentials come from the usual AWS variables and files."""

    def __init__(self, path: str) -> None:
        """Connect, and check that the bucket exists."""
        self.bucket, _, self.prefix = path.strip("/").partition("/")
        if not self.bucket:
            raise StoreError(f"store.root 's3://{path}' names no bucket. Write s3://bucket/prefix.")
        self.uri = "s3://" + "/".join(part for part in (self.bucket, self.prefix) if part)
        self._fs = connection(attempts=_ATTEMPTS, connect_s=10, read_s=60)
        self._quick = Quick(self._fs, self.bucket)
        check_bucket(self.uri, self.bucket)

    def put(self, path: str, data: bytes, **arguments: Any) -> None:
        """Put an object in one request."""
        self._steady(self._fs.call_s3, "put_object", Bucket=self.bucket, Key=self._name(path), Body=data, **arguments)

    def put_new(self, path: str, data: bytes) -> bool:
        """Put an object if it does not exist; False when it does.

        A refusal may answer a retry of a put that had succeeded, so the object's writer is read back to confirm it.
        """
        self._require_conditions()
        writer = tag()
        if self._quick.put(self._name(path), data, writer=writer):
            return True
        try:
            self.put(path, data, IfNoneMatch="*", Metadata={"writer": writer})
        except OSError as error:
            if not _refused(error):
                raise
            head = self._steady(self._fs.call_s3, "head_object", Bucket=self.bucket, Key=self._name(path))
            return bool(head.get("Metadata", {}).get("writer") == writer)
        return True

    def metadata(self, path: str) -> ObjectMetadata | None:
        """Return the version of an object, its size, and its age by the server's clock; None if it does not exist."""
        try:
            head = self._steady(self._fs.call_s3, "head_object", Bucket=self.bucket, Key=self._name(path))
        except FileNotFoundError:
            return None
        now = parsedate_to_datetime(head["ResponseMetadata"]["HTTPHeaders"]["date"])
        age_s = (now - head["LastModified"]).total_seconds()
        return ObjectMetadata(version=str(head["ETag"]), age_s=age_s, size=int(head["ContentLength"]))

    def replace(self, path: str, data: bytes, version: str) -> str | None:
        """Replace a version of an object; return the new version, None if that one is no longer current.

        For a server that does not support the condition, the version is compared before.
        """
        # Ceph up to release 18 compares with the version without quotes.
        for condition in (version, version.strip('"')):
            try:
                self.put(path, data, IfMatch=condition)
                break
            except OSError as error:
                if status_of(error) in (400, 501):
                    if condition != version:
                        # The server supports conditions, as it refused the first one.
                        return None
                    metadata = self.metadata(path)
                    if metadata is None or metadata.version != version:
                        return None
                    self.put(path, data)
                    break
                if not (_refused(error) or status_of(error) == 404 or isinstance(error, FileNotFoundError)):
                    raise
            metadata = self.metadata(path)
            if metadata is None or metadata.version != version:
                # Another process replaced it, or an earlier put of these data succeeded whose answer was lost.
                own = metadata is not None and self.get(path) == data
                return self.replace(path, data, metadata.version) if metadata is not None and own else None
        else:
            return None
        metadata = self.metadata(path)
        return None if metadata is None else metadata.version

    def upload(self, file: Path, path: str) -> None:
        """Upload a file, a large one in parts that are aborted when one fails. No truncated object is left."""
        if file.stat().st_size <= LARGEST and self._quick.put(self._name(path), file.read_bytes()):
            return
        self._steady(self._fs.put_file, str(file), self._key(path))

    def get(self, path: str) -> bytes | None:
        """Return an object, or None when it does not exist."""
        try:
            # Never in concurrent parts: s3fs fills missing ones with zeros.
            data: bytes = self._steady(self._fs.cat_file, self._key(path), max_concurrency=1)
        except FileNotFoundError:
            return None
        return data

    def get_many(self, paths: list[str]) -> list[bytes | None]:
        """Return several small objects, fetched concurrently; None for those that do not exist."""
        cached: list[tuple[bool, bytes | None]] = [(False, None)] * len(paths)
        if paths and (self._quick.is_proven or len(paths) >= LEAST):
            cached = self._quick.get([self._name(path) for path in paths])
        got = [data for _, data in cached]
        left = [number for number, (certain, _) in enumerate(cached) if not certain]
        keys, none = [self._key(paths[number]) for number in left], [None] * len(left)
        # Not s3fs's 'cat', which treats names with brackets as patterns.
        options = {"on_error": "return", "max_concurrency": 1}
        blobs = self._steady(self._fs.cat_ranges, keys, none, none, **options) if left else []
        # One failure does not fail the others; each failed object is requested again separately.
        for number, answer in zip(left, blobs, strict=True):
            if isinstance(answer, bytes):
                got[number] = answer
            elif not isinstance(answer, FileNotFoundError):
                got[number] = self.get(paths[number])
        return got

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return a range of bytes of an object.

        Raises:
            FileNotFoundError: the object does not exist.
            CorruptError: the object ends before ``stop``.
        """
        if stop == start:
            return b""
        data: bytes = self._steady(self._fs.cat_file, self._key(path), start=start, end=stop)
        if len(data) != stop - start:
            raise CorruptError(f"{path}: bytes {start} to {stop} were requested, {len(data)} came: it is too short.")
        return data

    def names(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``; '' is the prefix itself."""
        top = f"{self._name(path).rstrip('/')}/".lstrip("/")
        names = set()
        for page in self._pages(Prefix=top, Delimiter="/"):
            names |= {entry["Prefix"] for entry in page.get("CommonPrefixes", ())}
            names |= {entry["Key"] for entry in page.get("Contents", ())}
        return sorted({name.removeprefix(top).rstrip("/") for name in names} - {""})

    def sizes(self, path: str) -> dict[str, int]:
        """Return the size of every object below ``path`` by its path below it, without markers of folders."""
        top = f"{self._name(path).rstrip('/')}/".lstrip("/")
        objects = (entry for page in self._pages(Prefix=top) for entry in page.get("Contents", ()))
        return {entry["Key"].removeprefix(top): int(entry["Size"]) for entry in objects if entry["Key"][-1] != "/"}

    def copy(self, path: str, target: str) -> None:
        """Copy an object."""
        self._steady(self._fs.cp_file, self._key(path), self._key(target))

    def delete(self, path: str, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Delete an object or everything below a folder, of which ``chosen`` has the path; a no-op without any."""
        name, top = self._name(path), self._name("")
        for page in self._pages(Prefix=name):
            keys = [entry["Key"] for entry in page.get("Contents", ())]
            below = [key for key in keys if key == name or key.startswith(f"{name}/")]
            doomed = [{"Key": key} for key in below if chosen(key.removeprefix(top))]
            if not doomed:
                continue
            request = {"Bucket": self.bucket, "Delete": {"Objects": doomed, "Quiet": True}}
            for error in self._steady(self._fs.call_s3, "delete_objects", **request).get("Errors", ()):
                raise OSError(f"{self.uri}: '{error['Key']}' cannot be deleted: {error.get('Message', error['Code'])}")

    def abort_uploads(self, older_than_s: float) -> int:
        """Abort this store's multipart uploads that are older than some seconds; return their number.

        Uploads of other stores, below the prefix or next to it, are not touched: their keys are no files of this store.
        """
        top = self._name("")
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=older_than_s)
        try:
            uploads = [each for page in self._pages(_UPLOADS, Prefix=top) for each in page.get("Uploads", ())]
        except (OSError, NotImplementedError, AccessRefusedError):
            return 0  # several servers cannot list them, and some credentials may not
        own = [each for each in uploads if each["Key"].startswith(top) and is_file(each["Key"].removeprefix(top))]
        stale = [each for each in own if each["Initiated"] < limit]
        for upload in stale:
            request = {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            # Another process may abort it first, and some credentials may not.
            with contextlib.suppress(OSError, AccessRefusedError):
                self._steady(self._fs.call_s3, "abort_multipart_upload", **request)
        return len(stale)

    def _require_conditions(self) -> None:
        with _probe_lock:
            if self.uri not in _conditional:
                _conditional[self.uri] = self._probe()
        if not _conditional[self.uri]:
            raise StoreError(
                f"'{self.uri}': this S3 server ignores 'If-None-Match', so two writers would silently overwrite each "
                "other's commits. Use a server (or an unversioned bucket) with conditional writes, or, if only one "
                "process ever writes here, set store.single_writer=true in the config, which the run's other commands "
                "follow, and FLOWMILL_SINGLE_WRITER=1 for 'flowmill store'."
            )

    def _probe(self) -> bool:
        """Return whether a second conditional put of one key is refused."""
        path = f".probe/{tag()}"
        try:
            self.put(path, b"first", IfNoneMatch="*")
            try:
                self.put(path, b"second", IfNoneMatch="*")
                honored = False
            except OSError as error:
                honored = _refused(error)
            self.delete(path)
        except OSError as error:
            if status_of(error) in (400, 404, 501):
                return False  # the header itself is not understood
            raise
        return honored

    def _steady(self, call: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
        """Call with retries and exponential backoff on throttling, server errors and broken connections.

        Raises:
            ConnectionError: the server could not be reached on the last attempt.
            StoreError: credentials are missing, expired or refused.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_transient),
            stop=tenacity.stop_after_attempt(_ATTEMPTS) | tenacity.stop_after_delay(_PATIENCE_S),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
            reraise=True,
        )
        try:
            result: _Result = retrying(call, *arguments, **options)
        except UNREACHED as error:
            raise ConnectionError(f"{self.uri}: {error}") from error
        except DENIED as error:
            raise refusal(self.uri, self.bucket, error) from None
        return result

    def _pages(self, listing: Listing = _OBJECTS, **arguments: str) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing, of up to a thousand entries each."""
        more: dict[str, Any] = {}
        sent = set()
        while True:
            page = self._steady(self._fs.call_s3, listing.call, Bucket=self.bucket, **arguments, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {name: page.get(field) for name, field in listing.tokens.items()}
            token = tuple(more.values())
            if not all(token) or token in sent:
                raise StoreError(
                    f"'{self.uri}': the listing of '{arguments.get('Prefix', '')}' does not end: {server()} says there "
                    "is more, and sends no continuation token or one that it sent before. Check the server, or a proxy "
                    "in between."
                )
            sent.add(token)

    def _name(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def _key(self, path: str) -> str:
        return f"{self.bucket}/{self._name(path)}"


def _refused(error: OSError) -> bool:
    """Return whether a put was refused because the object exists; the error of s3fs depends on the server."""
    return isinstance(error, FileExistsError) or status_of(error) == 412


def _transient(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, *UNREACHED)):
        return True
    # 409: another conditional put of the same key is in progress.
    return isinstance(error, OSError) and (status_of(error) >= 500 or status_of(error) in (409, 429))
