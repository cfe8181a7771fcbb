"""A lease on S3: an object that names its holder and is renewed while the holder lives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flowmill.configs.errors import RunConflictError, StoreError, first_line
from flowmill.storage.backends.bucket import Bucket, ObjectMetadata
from flowmill.storage.backends.process_tags import is_gone, process_label, tag

#: Seconds of the server's clock after which any process may take a lease that was not renewed.
LEASE_S = 60.0
#: Share of it on which the holder relies: servers give times in whole seconds.
_OWN = 0.95


def holder_of(bucket: Bucket, path: str, metadata: ObjectMetadata | None) -> str | None:
    """Return the tag of the process that holds a lease; None if it is free, expired, or its process is gone.

    An object of another form is no lease: stores copied from a disk have lock files that hold a process id.

    Args:
        bucket: bucket of the lease.
        path: its object.
        metadata: version and age of the object.
    """
    data = None if metadata is None else bucket.get(path)
    if metadata is None or data is None:
        return None
    try:
        holder = json.loads(data)["holder"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if not isinstance(holder, str) or is_gone(holder) or metadata.age_s >= LEASE_S else holder


class Lease:
    """One lease of this process."""

    def __init__(self, bucket: Bucket, path: str, label: str, create: Callable[[str, bytes], bool]) -> None:
        """Bind to a lease without taking it.

        Args:
            bucket: bucket of the lease.
            path: its object.
            label: the leased object, for messages.
            create: puts an object if it does not exist.
        """
        self._bucket, self._label, self._create = bucket, label, create
        self.path = path
        """Its object."""
        self._holder = tag()
        self._body = json.dumps({"holder": self._holder}).encode()
        self._version = ""
        self._ends = 0.0
        self._lost = False
        self._renewing = threading.Lock()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="lease")

    def take(self) -> None:
        """Take the lease, and renew it until it is released."""
        for _ in range(3):
            began = time.monotonic()
            version = self._taken()
            if version is not None:
                self._version, self._ends = version, began + _OWN * LEASE_S
                self._keeper.start()
                return
        raise RunConflictError(f"{self._label}: other processes keep taking its lease. Try again.")

    def check(self) -> None:
        """Check that this process still holds the lease; one that has ended is renewed, unless it was taken over."""
        if not self._lost and time.monotonic() >= self._ends:
            self._renew_ended()
        if self._lost:
            raise RunConflictError(
                f"{self._label} was taken over by another process while this one could not renew its lease. Committed "
                "data stays, and the other process goes on with it."
            )

    def give_back(self) -> None:
        """Release the lease, unless the server refuses or was lost: then it ends by itself."""
        self._stop.set()
        self._keeper.join()
        if self._lost or time.monotonic() >= self._ends:
            return
        with suppress(Exception):
            metadata = self._bucket.metadata(self.path)
            if metadata is not None and metadata.version == self._version:
                self._bucket.delete(self.path)

    def _taken(self) -> str | None:
        """Take the lease unless a live process holds it; return its version, None if another process was faster."""
        if self._create(self.path, self._body):
            metadata = self._bucket.metadata(self.path)
            return None if metadata is None else metadata.version
        metadata = self._bucket.metadata(self.path)
        holder = holder_of(self._bucket, self.path, metadata)
        if holder is not None:
            raise RunConflictError(
                f"{self._label} is being executed by another process ({process_label(holder)}). "
                "Wait for it, stop it, or choose another name with --name."
            )
        return None if metadata is None else self._bucket.replace(self.path, self._body, metadata.version)

    def _keep(self) -> None:
        while not self._lost and not self._stop.wait(LEASE_S / 4):
            # Any failure may be temporary, and without this thread another process would take the lease.
            with suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        """Renew the lease, or note that another process has taken it; the condition of the put tells which."""
        with self._renewing:
            began = time.monotonic()
            version = self._bucket.replace(self.path, self._body, self._version)
            if version is None:
                self._lost = True
            else:
                self._version, self._ends = version, began + _OWN * LEASE_S

    def _renew_ended(self) -> None:
        try:
            self._renew()
        except Exception as error:
            raise StoreError(
                f"{self._label}: its lease could not be renewed for {LEASE_S:.0f} s ({first_line(error)}), so another "
                "process may execute the run by now, and this one commits nothing more. Committed data stays: when the "
                "store answers again, the same command goes on."
            ) from error
