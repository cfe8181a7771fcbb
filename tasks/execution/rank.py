"""Entry point of torchrun: runs a module with flowmill's packages first, and the user's folder last on the path.

It dies with its agent, even if the agent was killed before this process could ask the kernel for it.
``torchrun ... tasks/execution/rank.py MODULE ARGUMENTS``; torchrun's own ``-m`` would put the working directory first.
"""

import runpy
import signal
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, _ROOT)
from configs.import_paths import own_packages_first, user_folder_last  # noqa: E402
from tasks.execution.parent_death import die_with_parent, end_without_agent  # noqa: E402

sys.path.remove(_ROOT)

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    end_without_agent()
    own_packages_first()
    user_folder_last()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
