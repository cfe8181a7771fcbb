"""The number of epochs of a run: that of the config, but never fewer than the run already has, unless requested."""

from __future__ import annotations

from flowmill.configs.load import override_config
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder

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


def remember_length(run: RunFolder, epochs: int, *, advance: int | None = None) -> None:
    """Record a run's number of epochs, which overrides that of a config, and the requested number of further ones."""
    run.add(_SERIES, {"epochs": epochs} | ({} if advance is None else {"advance": advance}))


def advance_begun(run: RunFolder, epochs: int) -> int | None:
    """Return the number of epochs to which the last request for so many further ones leads; None without one."""
    newest, config = run.newest(_SERIES) or {}, run.config()
    current = config is not None and newest.get("epochs") == config["run"]["epochs"]
    return int(newest["epochs"]) if current and newest.get("advance") == epochs else None


def length_note(config: RunConfig, own: RunConfig) -> str | None:
    """Return a note if a run keeps its length, else None."""
    if config.run.epochs == own.run.epochs:
        return None
    return (
        f"Run '{own.run.name}' has {own.run.epochs} epochs and the config asks for {config.run.epochs}: it keeps "
        f"them. With --rewind it would end after epoch {config.run.epochs}: later epochs would stay in the "
        "store, outside the run, and MLflow's curves and its alias 'champion', of the best model, would go back."
    )
