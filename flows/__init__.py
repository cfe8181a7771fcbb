"""Prefect flows: one per stage, one that chains them, deployments, and the command line. All of Prefect is here."""

import sys
from pathlib import Path

# The packages have plain names: a user's own configs/ or tasks.py that comes first on the path must not be found.
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _ROOT)
from configs.import_paths import own_packages_first  # noqa: E402

sys.path.remove(_ROOT)
own_packages_first()
