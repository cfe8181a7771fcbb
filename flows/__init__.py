"""Prefect flows: one per stage, one that chains them, deployments, and the command line. All of Prefect is here."""

import sys
from pathlib import Path

# The package names are common words: a user's configs/ or tasks.py earlier on the path must not be imported instead.
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _ROOT)
from configs.import_paths import own_packages_first  # noqa: E402

sys.path.remove(_ROOT)
own_packages_first()
