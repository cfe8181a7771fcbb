"""``flowmill`` with its denoisers' rows counted: ``python -m tests.benchmarks.ours COUNTS ARGUMENTS ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.benchmarks.work import Rows

if __name__ == "__main__":
    rows, counts = Rows(), Path(sys.argv.pop(1))
    from flows.cli import main

    try:
        main()
    finally:
        counts.write_text(json.dumps(rows.counted()))
