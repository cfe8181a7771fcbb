"""Recorded requirements of a run's algorithm, so that readers of the run import neither it nor torch."""

from __future__ import annotations

from flowmill.configs.algorithm_defaults import AlgorithmNeeds
from flowmill.configs.base import Component
from flowmill.configs.errors import TrustError
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.inputs.components import algorithm_needs

_SERIES = "needs"


def note_needs(run: RunFolder, config: RunConfig) -> None:
    """Record the requirements of a run's algorithm."""
    algorithm = config.optimize.algorithm
    run.add(_SERIES, {"algorithm": algorithm.model_dump(mode="json"), **algorithm_needs(config)._asdict()})


def knowing_needs(config: RunConfig, run: RunFolder, *, trusted: bool) -> RunConfig:
    """Return the config of a run to read, with the recorded requirements of its algorithm.

    Records of earlier versions have them for custom algorithms only; a built-in one is then imported.

    Args:
        trusted: without such a record, allow importing the algorithm to find its requirements.
    """
    algorithm = config.optimize.algorithm
    note = run.newest(_SERIES)
    if note is None or Component.model_validate(note["algorithm"]) != algorithm:
        if trusted or ":" not in algorithm.name:
            return config
        raise TrustError(
            f"Run '{run.name}' trains with '{algorithm.name}', and its record lacks the requirements of this "
            "algorithm, which earlier versions did not write; it is not imported to find them. Start the run once more "
            "with its config file ('flowmill run CONFIG'): artifacts are kept, and the requirements are recorded."
        )
    return config.knowing(
        algorithm, AlgorithmNeeds(**{name: note[name] for name in AlgorithmNeeds._fields if name in note})
    )
