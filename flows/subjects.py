"""What deployments work on: a config that can run and a run that is there, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.load import load_config
from configs.presets import presets
from configs.schema import RunConfig
from flows.environment import as_overrides, existing_root
from flows.requests import StageRequest

#: What decides on which config or run a deployment works.
_SUBJECTS = ("config", "run", "root")
#: Runs that a message names.
_NAMED = 10
_ROOT: str = StageRequest.model_fields["root"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One deployment as a command asks for it."""

    usual: Mapping[str, Any]
    """What the file of deployments asks its flow for."""
    there: Mapping[str, Any] | None
    """What the deployment asks its flow for now; None where it is made."""
    given: Mapping[str, Any]
    """What the command names, of what the flow takes."""
    defaults: Mapping[str, Any]
    """What is taken where the command names nothing and the deployment is made."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """What the flow will be asked for."""
        before = {**self.usual, **self.defaults} if self.there is None else self.there
        return {**before, **self.given}

    @property
    def changes(self) -> bool:
        """Whether the command decides what the deployment works on."""
        return self.there is None or any(name in self.given for name in _SUBJECTS)


def usual_subject(wanted: Sequence[Wanted], *, here: bool) -> Mapping[str, Any]:
    """Return the run, and its root, of deployments that are made where the command names no run.

    It is the run of the config that the command names, else the only run in the store.

    Args:
        wanted: the deployments.
        here: whether their workers see the files of this folder; containers do not.

    Raises:
        ConfigError: the config cannot run, or the store holds no run, or several.
        StoreError: there is no store.
    """
    made = [each for each in wanted if each.there is None and "run" in each.usual and "run" not in each.given]
    if not made:
        return {}
    config = next((each for each in wanted if "config" in each.given), None)
    if config is not None and _can_read(config.asked, here=here):
        checked = checked_config(config.asked)
        return {"run": checked.run.name, "root": str(checked.store.root)}
    root = str(made[0].asked.get("root", _ROOT))
    if config is not None or not _can_look(root, here=here):
        raise ConfigError("Say with --run which run the deployments are for: their workers' files cannot be read here.")
    return {"run": _only_run(root)}


def check_subjects(wanted: Sequence[Wanted], *, here: bool) -> None:
    """Check that what deployments are to work on is there; what a command does not touch is not looked at.

    A run need not be there yet where the same command deploys the config that makes it.

    Args:
        wanted: the deployments.
        here: see ``usual_subject``; configs and stores that cannot be read here are taken as they are.

    Raises:
        ConfigError: a config is not there, cannot be read, or cannot run.
        PromptError: a prompt source of it cannot be used.
        StoreError: a run is not there, or no store.
    """
    touched = [each.asked for each in wanted if each.changes]
    configs = [asked for asked in _distinct(touched, "config") if _can_read(asked, here=here)]
    coming = {checked_config(asked).run.name for asked in configs}
    for asked in _distinct(touched, "run"):
        root = str(asked.get("root", _ROOT))
        if asked["run"] not in coming and _can_look(root, here=here):
            _check_run(str(asked["run"]), root)


def checked_config(asked: Mapping[str, Any]) -> RunConfig:
    """Return the config a pipeline is asked to run, if ``flowmill check`` would say that it can.

    Raises:
        ConfigError: it is not there, cannot be read, or cannot run.
        PromptError: a prompt source cannot be used.
    """
    path, overrides = str(asked["config"]), list(asked.get("overrides") or ())
    config = load_config(path, [*overrides, *as_overrides(asked.get("root"), asked.get("name"))])
    from tasks.checks.check import check_config
    from tasks.checks.names import check_names

    check_names(config, source=Path(path), overrides=overrides)
    check_config(config, rewards=False)
    return config


def _distinct(touched: Sequence[Mapping[str, Any]], subject: str) -> Iterator[Mapping[str, Any]]:
    """Yield requests that name a subject, one of those that name the same."""
    seen = set()
    for asked in touched:
        key = tuple(str(asked.get(name)) for name in (subject, "root", "name", "overrides"))
        if subject in asked and key not in seen:
            seen.add(key)
            yield asked


def _can_read(asked: Mapping[str, Any], *, here: bool) -> bool:
    """Return whether a config can be read as the worker reads it."""
    return here or asked["config"] in presets()


def _can_look(root: str, *, here: bool) -> bool:
    """Return whether a store can be looked into as the worker does."""
    return here or "://" in root


def _check_run(name: str, root: str) -> None:
    from storage.commit import ArtifactStore
    from tasks.runs.opening import require_run

    require_run(ArtifactStore(existing_root(root)), name)


def _only_run(root: str) -> str:
    from storage.commit import ArtifactStore
    from storage.lineage import list_runs

    where = existing_root(root)
    found = list_runs(ArtifactStore(where))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"'{where}' holds no run for the deployments to work on. Start one with 'flowmill run', or name the config "
            "that makes it with --config, or another store with --root."
        )
    raise ConfigError(
        f"'{where}' holds {len(found)} runs: {', '.join(found[:_NAMED])}{', ...' if len(found) > _NAMED else ''}. Say "
        "with --run which one the deployments are for; those of another get a name of their own with --name."
    )
