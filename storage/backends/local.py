"""A folder on a local or POSIX network file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from flowmill.configs.errors import RunConflictError, StoreError
from flowmill.configs.folders import share_files
from flowmill.configs.schema import StoreSection
from flowmill.configs.user_directories import user_path
from flowmill.storage.backends.base import Blob, FileEntry, Item, Result, Staging
from flowmill.storage.backends.checksums import check_file, check_size, hash_file
from flowmill.storage.backends.mapped_file import MappedFile
from flowmill.storage.backends.process_tags import tag
from flowmill.storage.layout import STAGING
from flowmill.storage.names import below, inside

#: Seconds to wait for a lock: longer than another process takes to probe whether it is locked.
_LOOKED_S = 0.2


class LocalBackend:
    """Objects are files; a link is exclusive, a rename is atomic."""

    def __init__(self, path: str, section: StoreSection | None = None) -> None:
        """Create the folder if needed; an existing one is not written to, as readers may lack permission."""
        self.folder = user_path(path).absolute()
        self.uri = self.disk = str(self.folder)
        self._opened_staging: Staging | None = None
        if not self.folder.is_dir():
            _ = self._staging
        self._checked: set[str] = set()
        #: Folders below the root that no link leads to.
        self._inside: set[str] = set()
        self._lock = threading.Lock()

    @property
    def _staging(self) -> Staging:
        """Folder of files in progress."""
        try:
            if self._opened_staging is None:
                self._opened_staging = Staging(self.folder)
        except OSError as error:
            raise _unusable(self.folder, error) from None
        if not os.access(self._opened_staging.folder, os.W_OK):
            raise StoreError(
                f"store.root '{self.folder}' is not writable. Choose a folder you can write to with --root."
            )
        return self._opened_staging

    def _at(self, path: str) -> Path:
        """Return the local path of a path in the store; raise StoreError if it leads out of the root."""
        try:
            inside(path)
            folder, _, _ = path.rpartition("/")
            full = os.path.join(self.uri, path)
            if not self._is_inside(folder) or os.path.islink(full):
                below(self.folder, path)
        except ValueError as error:
            raise StoreError(
                f"{self.uri}: {error}. Nothing outside a store's root is read or written; remove it from the store."
            ) from None
        return Path(full)

    def _is_inside(self, folder: str) -> bool:
        """Return whether the path of a folder contains no link, so that its files need no further check."""
        if not folder or folder in self._inside:
            return True
        try:
            mode = os.lstat(os.path.join(self.uri, folder)).st_mode
        except OSError:
            # A missing path may become a link.
            mode = 0
        if stat.S_ISLNK(mode) or not self._is_inside(folder.rpartition("/")[0]):
            return False
        if stat.S_ISDIR(mode):
            self._inside.add(folder)
        return True

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object exclusively and durably (write, fsync, link); False when it exists."""
        target, staging = self._at(path), self._staging.folder
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = staging / f"{tag()}.tmp"
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
        """Sync every file and rename the folder into place; all who may list the folder above may read them.

        An existing target should be equal, as its name contains the digest, and may have parts of other processes: it
        stays if it has the same files, and is replaced if not.
        """
        target = self._at(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        share_files(folder, target.parent)
        for file in sorted(folder.rglob("*")):
            _sync_folder(file) if file.is_dir() else _sync_file(file)
        _sync_folder(folder)
        while not _moved(folder, target) and not _holds(target, folder):
            self._make_room(target)
        _sync_folder(target.parent)

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small object, or None when it does not exist."""
        try:
            with _opened(self._at(path), os.O_RDONLY) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def read_many(self, paths: list[str]) -> list[bytes | None]:
        """Return the bytes of several small objects."""
        return [self.read(path) for path in paths]

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the results of a function for some items."""
        return [function(item) for item in items]

    def list(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``."""
        try:
            return sorted(os.listdir(self._at(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, path: str) -> Mapping[str, int]:
        """Return the size of every file below ``path`` by its path below it."""
        return dict(sorted(_sizes(self._at(path), ""), key=lambda item: item[0].split("/")))

    def fetch(self, path: str, entry: FileEntry) -> Path:
        """Return the local path, checked once per process."""
        where = f"{path}/{entry.name}"
        with self._lock:
            checked = where in self._checked
        if not checked:
            check_file(self._at(where), entry, where=where)
            self._note_checked(where)
        return self._at(where)

    def check(self, path: str, entry: FileEntry) -> None:
        """Read a committed file again and compare every byte."""
        check_file(self._at(f"{path}/{entry.name}"), entry, where=f"{path}/{entry.name}")

    def blob(self, path: str, entry: FileEntry) -> Blob:
        """Map a committed file; the blocks of a large one are checked when they are read."""
        where = f"{path}/{entry.name}"
        with self._lock:
            checked = where in self._checked
        if checked or not entry.blocks:
            return MappedFile(self.fetch(path, entry), where=where)
        file = self._at(where)
        check_size(file.stat().st_size if file.is_file() else None, entry, where=where)
        return MappedFile(file, where=where, entry=entry, on_checked=lambda: self._note_checked(where))

    def _note_checked(self, where: str) -> None:
        with self._lock:
            self._checked.add(where)

    def move(self, path: str, target: str) -> None:
        """Rename an object or folder."""
        self._at(target).parent.mkdir(parents=True, exist_ok=True)
        self._at(path).rename(self._at(target))
        with self._lock:
            self._checked.clear()

    def remove(self, path: str) -> None:
        """Remove an object or folder."""
        target = self._at(path)
        try:
            target.unlink(missing_ok=True)
        except IsADirectoryError:
            self._make_room(target)
        with self._lock:
            self._checked.clear()

    def remove_below(self, path: str, chosen: Callable[[str], bool]) -> None:
        """Remove the chosen ones of the objects and folders directly below a folder."""
        for name in filter(chosen, self.list(path)):
            self.remove(f"{path}/{name}")

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """Provide a private folder on the same file system; removed afterwards."""
        return self._staging.make()

    def sweep(self) -> int:
        """Remove staging files of killed processes of this host; return the number of entries."""
        return self._staging.sweep()

    def _make_room(self, target: Path) -> None:
        # Moved before deletion, so that no process sees half of it and several processes can do this at once.
        aside = self._staging.folder / tag()
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, path: str, label: str) -> Iterator[None]:
        """Hold an flock, which the kernel releases when the process ends for any reason."""
        target = self._at(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            opened = _opened_lock(target)
        except OSError as error:
            raise _unusable(self.folder, error) from None
        with opened as file:
            # All who may list the folder look at its locks, and the umask of one process may keep others from them.
            with contextlib.suppress(OSError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.parent.stat().st_mode) & 0o666)
            if not _locks(file, fcntl.LOCK_EX):
                holder = file.read().decode("ascii", "replace").strip()
                raise RunConflictError(
                    f"{label} is being executed by another process (pid {holder or 'unknown'}). "
                    "Wait for it, stop it, or choose another name with --name."
                )
            # Only for messages, so a full disk is no reason not to lock.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), str(os.getpid()).encode())
            yield

    def locked(self, path: str) -> bool:
        """Return whether a process holds a lock."""
        try:
            with _opened(self._at(path), os.O_RDONLY) as file:
                return not _locks(file, fcntl.LOCK_SH, patience_s=0.0)
        except FileNotFoundError:
            return False
        except PermissionError:
            lock = self._at(path)
            raise StoreError(
                f"'{lock}' cannot be read, so it is unknown whether a process holds this lock. Let its owner make the "
                f"folder readable: chmod -R a+rX '{lock.parent}'."
            ) from None


def _sizes(folder: str | Path, top: str) -> Iterator[tuple[str, int]]:
    """Yield path and size of every file below a folder; pathlib would take four times as long."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.path, f"{top}{entry.name}/") if entry.name != STAGING else ()
            elif entry.is_file():
                yield f"{top}{entry.name}", entry.stat().st_size


def _opened(path: Path, flags: int) -> IO[bytes]:
    """Open a regular file for reading; a pipe in its place would make a reader wait for a writer."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise StoreError(f"'{path}' is a pipe or a device, and cannot be read as a file. Remove it from the store.")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _opened_lock(path: Path) -> IO[bytes]:
    """Open a lock; those of all runs of a store may be more than the files that a process may open at first."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return _opened(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return _opened(path, flags)


def _locks(file: IO[bytes], kind: int, *, patience_s: float = _LOOKED_S) -> bool:
    """Return whether an open file could be locked; waits a moment for processes that only probe the lock."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOKED_S / 10)
        else:
            return True


def _unusable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"store.root '{folder}' cannot be used: {error.strerror}. Choose a folder you can write to with --root."
    )


def _moved(folder: Path, target: Path) -> bool:
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _holds(target: Path, folder: Path) -> bool:
    """Return whether a folder has all files of another one, with the same contents."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    try:
        return all(hash_file(target / file.relative_to(folder)) == hash_file(file) for file in files)
    except (FileNotFoundError, NotADirectoryError):  # another process may have moved it away in the meantime
        return False


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
