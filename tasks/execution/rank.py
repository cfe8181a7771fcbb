"""Entry point of torchrun: runs a module with the user's folder last on the path.

It dies with its agent, even if the agent was killed before this process could request it from the kernel.
``torchrun ... tasks/execution/rank.py MODULE ARGUMENTS``; torchrun's own ``-m`` would put the working directory first.
"""

import runpy
import signal
import sys
from pathlib import Path

_HOME = next(str(up) for up in Path(__file__).resolve().parents if (up / "flowmill" / "__init__.py").is_file())
sys.path.insert(0, _HOME)
from flowmill.configs.import_paths import user_folder_last  # noqa: E402
from flowmill.tasks.execution.parent_death import die_with_parent, end_without_agent  # noqa: E402

sys.path.remove(_HOME)

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    end_without_agent()
    user_folder_last()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
