"""flowmill from Python: stores and runs as tables and images, and stages from a notebook or a Prefect flow of your own.

    import flowmill

    run = flowmill.open("flowmill-store").run("digits")
    run.samples(3).to_pandas()          # every sample of epoch 3, with rewards and advantage

Reading loads neither torch nor Prefect before something needs it, and changes nothing.
"""

from __future__ import annotations

from configs.errors import FlowmillError
from flowmill.start import start
from flowmill.store_reader import Run, Store, open

__all__ = ["FlowmillError", "Run", "Store", "open", "start"]
