"""Requests to one prefix of an S3 bucket, through s3fs: retried, range-exact, with a conditional put that is proven.

Some servers ignore the condition of a put without saying so; it is tried once per process before anything is committed.
Multipart completion ignores it on more servers still, so nothing relies on that.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import CorruptError, StoreError
from storage.roots.base import tag

try:
    import s3fs
    import tenacity
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError
    from botocore.exceptions import ConnectionError as EndpointError
except ModuleNotFoundError as error:
    raise StoreError(
        f"store.root: stores on S3 need '{error.name}'. Install flowmill with its extra 's3': "
        "pip install 'flowmill[s3]'."
    ) from None

_Result = TypeVar("_Result")
_ATTEMPTS = 6

#: Answers of the probe by uri, one probe per process.
_conditional: dict[str, bool] = {}
_probe_lock = threading.Lock()


class Bucket:
    """Objects below ``s3://bucket/prefix``; endpoint and credentials come from the usual AWS variables and files."""

    def __init__(self, path: str) -> None:
        """Connect, and check that the bucket is there.

        Raises:
            StoreError: it is not, or credentials are missing or refused.
        """
        self.bucket, _, self.prefix = path.strip("/").partition("/")
        if not self.bucket:
            raise StoreError(f"store.root 's3://{path}' names no bucket. Write s3://bucket/prefix.")
        self.uri = "s3://" + "/".join(part for part in (self.bucket, self.prefix) if part)
        self._fs = s3fs.S3FileSystem(
            use_listings_cache=False,
            config_kwargs={
                "retries": {"mode": "standard", "max_attempts": _ATTEMPTS},
                "connect_timeout": 10,
                "read_timeout": 60,
                # Several servers send checksums their own way; every byte is checked against its commit record instead.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        self._check()

    def put(self, path: str, data: bytes, **arguments: Any) -> None:
        """Put an object in one request."""
        self._steady(self._fs.call_s3, "put_object", Bucket=self.bucket, Key=self._name(path), Body=data, **arguments)

    def put_new(self, path: str, data: bytes) -> bool:
        """Put an object on condition that there is none; False when there is.

        A refusal may be the answer to the client's own second try of a put that had succeeded, so the object's writer
        is read back before it is believed.

        Raises:
            StoreError: this server does not keep conditions.
        """
        self._require_conditions()
        writer = tag()
        try:
            self.put(path, data, IfNoneMatch="*", Metadata={"writer": writer})
        except OSError as error:
            if not _refused(error):
                raise
            about = self._steady(self._fs.call_s3, "head_object", Bucket=self.bucket, Key=self._name(path))
            return bool(about.get("Metadata", {}).get("writer") == writer)
        return True

    def upload(self, file: Path, path: str) -> None:
        """Upload a file; a large one in parts, which are aborted when one fails. No truncated object is left."""
        self._steady(self._fs.put_file, str(file), self._key(path))

    def get(self, path: str) -> bytes | None:
        """Return an object, or None when it does not exist."""
        try:
            # Never in concurrent parts: s3fs fills what is missing of those with zeros.
            data: bytes = self._steady(self._fs.cat_file, self._key(path), max_concurrency=1)
        except FileNotFoundError:
            return None
        return data

    def get_many(self, paths: list[str]) -> list[bytes | None]:
        """Return several small objects, fetched concurrently; None for those that do not exist."""
        keys = [self._key(path) for path in paths]
        found = self._steady(self._fs.cat, keys, on_error="return", max_concurrency=1) if keys else {}
        # One failure does not fail the others; what did not come is asked for again on its own.
        return [
            found[key] if isinstance(found.get(key), bytes) else self.get(path)
            for key, path in zip(keys, paths, strict=True)
        ]

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Return some bytes of an object.

        Raises:
            FileNotFoundError: it does not exist.
            CorruptError: it ends before ``stop``.
        """
        if stop == start:
            return b""
        data: bytes = self._steady(self._fs.cat_file, self._key(path), start=start, end=stop)
        if len(data) != stop - start:
            raise CorruptError(f"{path}: bytes {start} to {stop} were asked for, {len(data)} came: it is too short.")
        return data

    def names(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``."""
        try:
            found = self._steady(self._fs.ls, self._key(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != self._key(path)})

    def sizes(self, path: str) -> dict[str, int]:
        """Return the size of every object below ``path`` by its path below it."""
        top = self._key(path).rstrip("/") + "/"
        found = self._steady(self._fs.find, top.rstrip("/"), detail=True)
        return {name.removeprefix(top): int(about["size"]) for name, about in found.items() if name.startswith(top)}

    def copy(self, path: str, target: str) -> None:
        """Copy an object."""
        self._steady(self._fs.cp_file, self._key(path), self._key(target))

    def delete(self, path: str) -> None:
        """Delete an object or everything below a folder; a no-op when there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            self._steady(self._fs.rm, self._key(path), recursive=True)

    def abort_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below the prefix that began before some seconds ago; return how many."""
        try:
            uploads = self._fs.list_multipart_uploads(self.bucket)
        except (OSError, NotImplementedError):
            return 0  # several servers cannot list them
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=older_than_s)
        stale = [u for u in uploads or () if u["Key"].startswith(self.prefix) and u["Initiated"] < limit]
        for upload in stale:
            about = {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            self._fs.call_s3("abort_multipart_upload", **about)
        return len(stale)

    def _require_conditions(self) -> None:
        with _probe_lock:
            if self.uri not in _conditional:
                _conditional[self.uri] = self._probe()
        if not _conditional[self.uri]:
            raise StoreError(
                f"'{self.uri}': this S3 server ignores 'If-None-Match', so two writers would silently overwrite each "
                "other's commits. Use a server (or an unversioned bucket) with conditional writes, or, if only one "
                "process ever writes here, set store.single_writer=true."
            )

    def _probe(self) -> bool:
        """Return whether a second conditional put of one key is refused."""
        path = f".probe/{tag()}"
        try:
            self.put(path, b"first", IfNoneMatch="*")
            try:
                self.put(path, b"second", IfNoneMatch="*")
            except OSError as error:
                return _refused(error)
            return False
        except OSError as error:
            if _status(error) in (400, 404, 501):
                return False  # the header itself is not understood
            raise
        finally:
            self.delete(path)

    def _check(self) -> None:
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "AWS")
        try:
            self._steady(self._fs.call_s3, "head_bucket", Bucket=self.bucket)
        except FileNotFoundError:
            raise StoreError(
                f"'{self.uri}': there is no bucket '{self.bucket}' at {endpoint}. Create it first."
            ) from None
        except (PermissionError, NoCredentialsError) as error:
            raise StoreError(
                f"'{self.uri}': access to bucket '{self.bucket}' at {endpoint} is refused ({error}). "
                "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from None
        except OSError as error:
            raise StoreError(
                f"'{self.uri}': {endpoint} does not answer ({error}). Check AWS_ENDPOINT_URL and the network."
            ) from None

    def _steady(self, call: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
        """Call, and call again with growing pauses on what may pass: throttling, server errors, broken connections.

        Raises:
            ConnectionError: the server could not be reached to the last.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_transient),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
            reraise=True,
        )
        try:
            result: _Result = retrying(call, *arguments, **options)
        except (HttpError, HTTPClientError, EndpointError) as error:
            raise ConnectionError(f"{self.uri}: {error}") from error
        return result

    def _name(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def _key(self, path: str) -> str:
        return f"{self.bucket}/{self._name(path)}"


def _status(error: BaseException) -> int:
    cause = error if isinstance(error, ClientError) else error.__cause__
    response = getattr(cause, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _refused(error: OSError) -> bool:
    """Return whether a put was refused because the object exists; s3fs says so in different ways per server."""
    return isinstance(error, FileExistsError) or _status(error) == 412


def _transient(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | HttpError | HTTPClientError | EndpointError):
        return True
    # 409: another conditional put of the same key is under way.
    return isinstance(error, OSError) and (_status(error) >= 500 or _status(error) in (409, 429))
