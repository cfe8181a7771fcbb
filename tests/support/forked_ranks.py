"""torchrun's agents whose ranks need not import anything: both are forked from a process that has.

The agent is torchrun's own, with its meeting, its supervision and its error files; it forks ranks where it would
otherwise start them, and they go on with the module that they were to run.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.preloaded import AGENT, Forked

#: Where ranks find what their agent was given as its input: multiprocessing closes that of what it starts.
_INPUT = 100


class ForkedAgent(Forked):
    """An agent that was forked, as ``flowmill.tasks.execution.launch.start_agent`` returns those that it starts."""

    def __init__(self, address: str, command: Sequence[str], stdin: int) -> None:
        """Fork it.

        Args:
            address: where the process that forks listens.
            command: a launcher's: ``env``, settings, Python, then the agent and its arguments.
            stdin: descriptor of its input.
        """
        (agent,) = (i for i, word in enumerate(command) if word.endswith("tasks/execution/agent.py"))
        settings = dict(word.split("=", 1) for word in command[1:agent] if "=" in word)
        read, write = os.pipe()
        self.stdout = open(read, errors="replace")  # noqa: SIM115 - as long as this is
        super().__init__(
            address,
            [AGENT, *command[agent + 1 :]],
            cwd=Path.cwd(),
            env={**os.environ, **settings},
            streams=[stdin, write, write],
        )
        os.close(write)


def be_agent(arguments: Sequence[str]) -> None:
    """Be torchrun's agent until its ranks have ended.

    Args:
        arguments: as ``tasks/execution/agent.py`` has them, from the host on.
    """
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from flowmill.tasks.execution.rendezvous import BACKEND, make_rendezvous, reachable, stay_on_interface

    os.dup2(0, _INPUT)
    stay_on_interface(reachable(arguments[0], int(arguments[1])))
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    options = parse_args([f"--rdzv-backend={BACKEND}", *arguments[2:]])
    config, _, _ = config_from_args(options)
    config.start_method = "fork"
    record(lambda: elastic_launch(config, _be_rank)(*options.training_script_args))()


def _be_rank(module: str, *arguments: str) -> None:
    """Run a module, as ``tasks/execution/rank.py`` does."""
    from flowmill.configs.import_paths import user_folder_last
    from flowmill.tasks.execution.parent_death import die_with_parent

    die_with_parent(signal.SIGKILL)
    os.dup2(_INPUT, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    user_folder_last()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
