"""What a config names outside itself. An option annotated so is refused where what it names is not there.

The names of these types are read from the text of components (``configs.peek``), so that nothing heavy is imported.
"""

from __future__ import annotations

from typing import TypeAlias

#: A folder, or the id of a model on the hub.
ModelPlace: TypeAlias = str
#: A folder.
FolderPlace: TypeAlias = str
#: A file.
FilePlace: TypeAlias = str


def looks_local(path: str) -> bool:
    """Return whether a model's path can only be a folder, being no hub id like 'owner/name'."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1
