"""What a run writes down of an algorithm of the user's own, so that whoever reads the run need not import it."""

from __future__ import annotations

from configs.errors import TrustError
from configs.schema import AlgorithmNeeds, RunConfig
from configs.section import Component
from storage.lineage import RunFolder
from tasks.inputs.components import algorithm_needs

_SERIES = "needs"


def note_needs(run: RunFolder, config: RunConfig) -> None:
    """Write down what an algorithm of the user's own needs; what those of the table need is known everywhere.

    Raises:
        ConfigError: it cannot be imported.
        StoreError: it cannot be written.
    """
    algorithm = config.optimize.algorithm
    if ":" in algorithm.name:
        run.add(_SERIES, {"algorithm": algorithm.model_dump(mode="json"), **algorithm_needs(config)._asdict()})


def knowing_needs(config: RunConfig, run: RunFolder, *, trusted: bool) -> RunConfig:
    """Return the config of a run that is read, with what the run wrote down of an algorithm of the user's own.

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
            f"Run '{run.name}' trains with '{algorithm.name}', and its record does not say what that needs, as earlier "
            "versions wrote none of it down; it is not imported to find out. Start the run once more with its "
            "config file ('flowmill run CONFIG'): what is made is kept, and what is needed is written down."
        )
    return config.knowing(algorithm, AlgorithmNeeds(*(note[name] for name in AlgorithmNeeds._fields)))
