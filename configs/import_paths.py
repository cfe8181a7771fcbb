"""Import order: flowmill's packages have common names, so they and a user's ``tasks.py`` or ``models/`` must not shadow
each other unnoticed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PACKAGES = ("configs", "flows", "models", "storage", "tasks")
ROOT = Path(__file__).resolve().parent.parent


def own_packages_first() -> None:
    """Import flowmill's packages from the parent folder of this one, regardless of ``sys.path``.

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
    """Append the working directory to ``sys.path``, so that a user's rewards and models are found last."""
    folder = str(Path.cwd())
    # 'python -m' puts the working directory first; one that PYTHONPATH names stays where the user put it.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [folder]):
        del sys.path[0]
    if folder not in sys.path:
        sys.path.append(folder)


def shadows(module: str) -> str | None:
    """Return why a module name refers to flowmill's package and not to the user's module; None if it does not."""
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
    """Return the path of the user's module or package of this name, if there is one."""
    for folder in dict.fromkeys([Path.cwd(), *(Path(entry or ".") for entry in sys.path)]):
        for path in (folder / name, folder / f"{name}.py"):
            if path.exists() and path.resolve() != ROOT / name:
                return path
    return None
