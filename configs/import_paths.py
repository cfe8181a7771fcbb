"""flowmill's own packages have plain names, so a user's ``tasks.py`` or ``models/`` must neither hide them nor hide
behind them unnoticed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PACKAGES = ("configs", "flows", "models", "storage", "tasks")
ROOT = Path(__file__).resolve().parent.parent


def own_packages_first() -> None:
    """Import flowmill's packages from the parent folder of this one, whatever the path holds; their imports follow.

    Raises:
        ImportError: a module of the same name has been imported already.
    """
    sys.path.insert(0, str(ROOT))
    try:
        for name in PACKAGES:
            file = importlib.import_module(name).__file__
            if file is None or Path(file).resolve() != ROOT / name / "__init__.py":
                raise ImportError(
                    f"flowmill's package '{name}' in {ROOT} is hidden by {file or 'a folder'}, which was imported "
                    "first. Rename that one."
                )
    finally:
        sys.path.remove(str(ROOT))


def user_folder_last() -> None:
    """Let rewards and models of the user's own be found in the working directory, after everything else."""
    folder = str(Path.cwd())
    # 'python -m' puts the working directory first; one that PYTHONPATH names stays where the user put it.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [folder]):
        del sys.path[0]
    if folder not in sys.path:
        sys.path.append(folder)


def shadows(module: str) -> str | None:
    """Return why a user's module cannot be meant by a name that begins like a package of flowmill's; None if it can."""
    name = module.partition(".")[0]
    if name not in PACKAGES:
        return None
    mine = _users_own(name)
    found = f", which hides your '{mine}'" if mine is not None else ""
    new = f"my_{mine.name if mine is not None else name}"
    return (
        f"'{name}' is flowmill's own package ({ROOT / name}){found}. Rename your file or folder, to '{new}' say, and "
        "the import string with it."
    )


def _users_own(name: str) -> Path | None:
    """Return the user's module or package of a name, if there is one on the path."""
    for folder in dict.fromkeys([Path.cwd(), *(Path(entry or ".") for entry in sys.path)]):
        for path in (folder / name, folder / f"{name}.py"):
            if path.exists() and path.resolve() != ROOT / name:
                return path
    return None
