"""What torchrun starts: runs a module with flowmill's own packages before, and the user's folder after all others.

It dies with the agent that started it, which can have been killed by then.
``torchrun ... tasks/execution/rank.py MODULE ARGUMENTS``; torchrun's own ``-m`` would put the working directory first.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies (Linux); end if it has already."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit("the process that started this one is gone")


_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _ROOT)
from configs.packages import own_packages_first, user_folder_last  # noqa: E402

sys.path.remove(_ROOT)

if __name__ == "__main__":
    die_with_parent()
    own_packages_first()
    user_folder_last()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
