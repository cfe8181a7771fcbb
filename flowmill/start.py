"""Starts runs from a user's program."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from flowmill.store_reader import Run


def start(
    config: str | Path,
    *,
    root: str | None = None,
    name: str | None = None,
    overrides: Collection[str] = (),
    rewind: bool = False,
) -> Run:
    """Return a new or existing run, whose stages can then be run; nothing is computed yet.

    Args:
        config: a preset, such as 'digits', or a config file.
        root: folder or s3://bucket/prefix of the store; FLOWMILL_ROOT, else the config's, when absent.
        name: name of the run; the config's, else the file's, when absent.
        overrides: settings that override the config, 'section.key=value' each.
        rewind: shorten a run that has more epochs than the config; otherwise it keeps them.

    Raises:
        FlowmillError: a setting cannot work, or a run of this name has other settings.
    """
    from configs.load import load_config
    from flows.environment import as_overrides, prepare_environment

    loaded = load_config(config, [*overrides, *as_overrides(root, name)])
    prepare_environment(loaded.execution.threads)
    from flows.process_state import begin
    from tasks.checks.check import check_config
    from tasks.inputs.store_trust import remember
    from tasks.runs.epoch_count import kept_length

    # Before the store is opened, which creates its folder.
    check_config(loaded, rewards=False)
    given = kept_length(loaded, rewind=rewind)
    remember(given)
    return Run(begin(given))
