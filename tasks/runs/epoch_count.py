"""The number of epochs of a run: that of the config, but never fewer than the run already has, unless requested."""

from __future__ import annotations

from configs.load import override_config
from configs.schema import RunConfig
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import RunFolder

#: Series of records of lengths requested outside the config: by ``--advance``, or by a stage of the next epoch.
_SERIES = "lengths"


def kept_length(config: RunConfig, *, rewind: bool = False) -> RunConfig:
    """Return a config with the current number of epochs of its run if the config requests fewer.

    Args:
        config: the request; returned unchanged for a new run.
        rewind: always return the config unchanged.
    """
    run = None if rewind or not config.run.name else RunFolder(ArtifactStore(config.store), config.run.name)
    has = 0 if run is None else length(run)
    return config if has <= config.run.epochs else override_config(config, [f"run.epochs={has}"])


def length(run: RunFolder) -> int:
    """Return the last configured number of epochs, limited to trained epochs unless it was explicitly requested."""
    config = run.config()
    if config is None:
        return 0
    last = int(config["run"]["epochs"])
    if (run.newest(_SERIES) or {}).get("epochs") == last:
        return last
    trained = max((entry.epoch for entry in run.entries() if entry.stage == "optimize"), default=0)
    return min(last, trained)


def remember_length(run: RunFolder, epochs: int) -> None:
    """Record a run's number of epochs, which overrides that of a config file."""
    run.add(_SERIES, {"epochs": epochs})


def length_note(asked: RunConfig, kept: RunConfig) -> str | None:
    """Return a note if a run keeps its length, else None."""
    if asked.run.epochs == kept.run.epochs:
        return None
    return (
        f"Run '{kept.run.name}' has {kept.run.epochs} epochs and the config asks for {asked.run.epochs}: it keeps "
        f"them. With --rewind it would end after epoch {asked.run.epochs}: later epochs would become side results, "
        "and MLflow's curves and the alias 'champion' would go back."
    )
