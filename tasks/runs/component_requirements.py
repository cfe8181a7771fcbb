"""Recorded needs of a user's own algorithm, so that readers of the run need not import it."""

from __future__ import annotations

from configs.base import Component
from configs.errors import TrustError
from configs.schema import AlgorithmNeeds, RunConfig
from storage.lineage import RunFolder
from tasks.inputs.components import algorithm_needs

_SERIES = "needs"


def note_needs(run: RunFolder, config: RunConfig) -> None:
    """Record the needs of a user's own algorithm; those of the table's algorithms are known everywhere.

    Raises:
        ConfigError: it cannot be imported.
        StoreError: it cannot be written.
    """
    algorithm = config.optimize.algorithm
    if ":" in algorithm.name:
        run.add(_SERIES, {"algorithm": algorithm.model_dump(mode="json"), **algorithm_needs(config)._asdict()})


def knowing_needs(config: RunConfig, run: RunFolder, *, trusted: bool) -> RunConfig:
    """Return the config of a run to read, with the recorded needs of a user's own algorithm.

    Args:
        config: the config.
        run: the run.
        trusted: where the run wrote nothing down, the algorithm may be imported to find out.

    Raises:
        TrustError: it wrote nothing down, and code that only a store names is not imported to find out.
    """
    algorithm = config.optimize.algorithm
    if ":" not in algorithm.name:
        return config
    note = run.newest(_SERIES)
    if note is None or Component.model_validate(note["algorithm"]) != algorithm:
        if trusted:
            return config
        raise TrustError(
            f"Run '{run.name}' trains with '{algorithm.name}', and its record lacks the needs of that, as earlier "
            "versions wrote none of it down; it is not imported to find out. Start the run once more with its "
            "config file ('flowmill run CONFIG'): artifacts are kept, and the needs are recorded."
        )
    return config.knowing(algorithm, AlgorithmNeeds(*(note[name] for name in AlgorithmNeeds._fields)))
