"""flowmill from Python: read stores and runs as tables and images, and run stages from a notebook or a Prefect flow.

    import flowmill

    run = flowmill.open("flowmill-store").run("digits")
    run.samples(3).to_pandas()          # every sample of epoch 3, with rewards and advantage

Reading changes nothing, and imports torch and Prefect only when needed.
"""

from __future__ import annotations

from configs.errors import FlowmillError
from flowmill.start import start
from flowmill.store_reader import Run, Store, open

__all__ = ["FlowmillError", "Run", "Store", "open", "start"]
