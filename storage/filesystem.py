"""Roots: the few operations a store needs from a file system.

A root creates small objects exclusively, publishes folders of finished files, and hands out local paths to read.
Everything above it is the same for every kind of storage; adding one is a class with these methods and a line in
``open_root``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from configs.errors import RunConflictError, StoreError
from storage.layout import STAGING


class Root(Protocol):
    """What a store needs from a file system. Paths are relative, with forward slashes."""

    uri: str

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object exclusively and durably; False when it exists already."""
        ...

    def publish(self, folder: Path, path: str) -> None:
        """Make a folder of finished files visible under ``path``, durably; a no-op when it is there already."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small object, or None when it does not exist."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``; empty when it does not exist."""
        ...

    def local(self, path: str) -> Path:
        """Return a local path to read an object or folder from."""
        ...

    def remove(self, path: str) -> None:
        """Remove a folder of transient files; a no-op when it does not exist."""
        ...

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """Give a private folder to write to; it is removed afterwards, whatever happens."""
        ...

    def sweep(self) -> int:
        """Remove what killed processes of this host left in their staging folders; return how many."""
        ...

    def lock(self, path: str, what: str) -> contextlib.AbstractContextManager[None]:
        """Hold an advisory lock, or raise RunConflictError naming ``what`` when another process holds it."""
        ...


def open_root(uri: str) -> Root:
    """Return the root for a URI or local path, made if needed.

    Raises:
        StoreError: the scheme is unknown, or the folder cannot be created or written.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalRoot(Path(uri))
    if scheme == "file":
        return LocalRoot(Path(uri.removeprefix("file://")))
    raise StoreError(f"store.root '{uri}': there is no store for '{scheme}://'. Use a local folder.")


class LocalRoot:
    """A folder on a local or POSIX network file system."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if needed and check that it can be written.

        Raises:
            StoreError: it cannot.
        """
        self.folder = folder.expanduser().absolute()
        self.uri = str(self.folder)
        try:
            (self.folder / STAGING).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"store.root '{self.folder}' cannot be used: {error.strerror}. "
                "Choose a folder you can write to with --root."
            ) from None
        if not os.access(self.folder / STAGING, os.W_OK):
            raise StoreError(
                f"store.root '{self.folder}' is not writable. Choose a folder you can write to with --root."
            )

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object exclusively and durably (write, fsync, link); False when it exists."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / STAGING / f"{self._tag()}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def publish(self, folder: Path, path: str) -> None:
        """Sync every file and rename the folder into place; equal content that is there already stays."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.rglob("*")):
            _sync_folder(file) if file.is_dir() else _sync_file(file)
        _sync_folder(folder)
        try:
            folder.rename(target)
        except OSError:
            # The name carries the content digest, so what is there is the same content, renamed in whole.
            if not target.is_dir():
                raise
        _sync_folder(target.parent)

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small object, or None when it does not exist."""
        try:
            return (self.folder / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``."""
        try:
            return sorted(os.listdir(self.folder / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def local(self, path: str) -> Path:
        """Return the path itself."""
        return self.folder / path

    def remove(self, path: str) -> None:
        """Remove a folder of transient files."""
        shutil.rmtree(self.folder / path, ignore_errors=True)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Give a private folder on the same file system; removed afterwards."""
        folder = self.folder / STAGING / self._tag()
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what killed processes of this host left in the staging folder; return how many entries."""
        host, swept = socket.gethostname(), 0
        for entry in (self.folder / STAGING).iterdir():
            owner, _, rest = entry.name.rpartition("-")[0].rpartition("-")
            if owner == host and rest.isdigit() and not _is_alive(int(rest)):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
                swept += 1
        return swept

    @contextlib.contextmanager
    def lock(self, path: str, what: str) -> Iterator[None]:
        """Hold an flock that the kernel releases when the process dies, however it dies."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise RunConflictError(
                    f"{what} is being executed by another process (pid {file.read().strip() or 'unknown'}). "
                    "Wait for it, stop it, or choose another name with --name."
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @staticmethod
    def _tag() -> str:
        return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
