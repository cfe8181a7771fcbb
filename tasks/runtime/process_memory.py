"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def process_peak() -> int:
    """Return the highest resident memory of this process in bytes; the system cannot reset it."""
    if sys.platform == "linux":
        # ru_maxrss survives exec on Linux: in a new process it begins with the memory of the parent.
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    # In KiB, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
