"""torchrun with a rendezvous on a single address: ``python agent.py HOST NODES TORCHRUN-ARGUMENTS``."""

import sys
from pathlib import Path

_HOME = next(str(up) for up in Path(__file__).resolve().parents if (up / "flowmill" / "__init__.py").is_file())
sys.path.insert(0, _HOME)
from flowmill.configs.errors import ConfigError  # noqa: E402
from flowmill.tasks.execution.rendezvous import BACKEND, make_rendezvous, reachable, stay_on_interface  # noqa: E402

sys.path.remove(_HOME)

if __name__ == "__main__":
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main

    host, nodes, *arguments = sys.argv[1:]
    try:
        stay_on_interface(reachable(host, int(nodes)))
    except ConfigError as error:
        sys.exit(str(error))
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    main([f"--rdzv-backend={BACKEND}", *arguments])
