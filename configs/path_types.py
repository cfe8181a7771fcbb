"""Types of options that name files, folders or models. An option of such a type is refused if its target is missing.

The target's content is part of the fingerprint. The names of these types are read from the source text of components
(``flowmill.configs.introspection``), which avoids heavy imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

#: A folder, or a model id on the hub.
ModelPlace: TypeAlias = str
#: A folder.
FolderPlace: TypeAlias = str
#: A folder of which only the files count that prompts name, in the column named by the option 'column', or 'image'.
ColumnFolderPlace: TypeAlias = str
#: A file.
FilePlace: TypeAlias = str
#: A fit in the store of the run, as NAME (the newest) or NAME@NUMBER; its folder is the value of the option 'path'.
FitPlace: TypeAlias = str
#: The options of another reward, which the option 'reward' names.
RewardOptions: TypeAlias = Mapping[str, Any]


def looks_local(path: str) -> bool:
    """Return whether a model's path must be a folder, because it is no hub id like 'owner/name'."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1
