"""What torchrun starts: runs a module with flowmill's own packages before, and the user's folder after all others.

``torchrun ... tasks/rank.py MODULE ARGUMENTS``; torchrun's own ``-m`` would put the working directory first.
"""

import runpy
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _ROOT)
from configs.packages import own_packages_first, user_folder_last  # noqa: E402

sys.path.remove(_ROOT)

if __name__ == "__main__":
    own_packages_first()
    user_folder_last()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
