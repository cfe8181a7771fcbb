"""A lease on S3: an object that names its holder and is renewed while the holder lives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from configs.errors import RunConflictError
from storage.backends.bucket import About, Bucket
from storage.backends.process_tags import is_gone, process_label, tag

#: Seconds of the server's clock after which any process may take a lease that was not renewed.
LEASE_S = 60.0


def holder_of(bucket: Bucket, path: str, found: About | None) -> str | None:
    """Return the tag of the process that holds a lease; None if it is free, expired, or its process is gone.

    Args:
        bucket: bucket of the lease.
        path: its object.
        found: version and age of the object.
    """
    data = bucket.get(path)
    if found is None or data is None:
        return None
    holder = str(json.loads(data)["holder"])
    return None if is_gone(holder) or found.age_s >= LEASE_S else holder


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
        self._bucket, self._path, self._label, self._create = bucket, path, label, create
        self._holder = tag()
        self._body = json.dumps({"holder": self._holder}).encode()
        self._version = ""
        self._lost = False
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._renew, daemon=True, name="lease")

    def take(self) -> None:
        """Take the lease, and renew it until it is given back.

        Raises:
            RunConflictError: a process that may be alive holds it.
        """
        for _ in range(3):
            version = self._taken()
            if version is not None:
                self._version = version
                self._keeper.start()
                return
        raise RunConflictError(f"{self._label}: other processes keep taking its lease. Try again.")

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            RunConflictError: another process has taken it.
        """
        if self._lost:
            raise RunConflictError(
                f"{self._label} was taken over by another process while this one could not renew its lease. Committed "
                "data stays, and the other process goes on with it."
            )

    def give_back(self) -> None:
        """Release the lease."""
        self._stop.set()
        self._keeper.join()
        found = self._bucket.about(self._path)
        if not self._lost and found is not None and found.version == self._version:
            self._bucket.delete(self._path)

    def _taken(self) -> str | None:
        """Take the lease unless a live process holds it; return its version, None if another process was faster."""
        if self._create(self._path, self._body):
            found = self._bucket.about(self._path)
            return None if found is None else found.version
        found = self._bucket.about(self._path)
        holder = holder_of(self._bucket, self._path, found)
        if holder is not None:
            raise RunConflictError(
                f"{self._label} is being executed by another process ({process_label(holder)}). "
                "Wait for it, stop it, or choose another name with --name."
            )
        return None if found is None else self._bucket.replace(self._path, self._body, found.version)

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_S / 4):
            try:
                version = self._bucket.replace(self._path, self._body, self._version)
            except OSError:
                # The server does not answer: retry later; another process may take the lease in the meantime.
                continue
            if version is None:
                self._lost = True
                return
            self._version = version
