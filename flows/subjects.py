"""The configs and runs that deployments work on, checked before any deployment is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.presets import presets
from configs.schema import RunConfig
from flows.chained import asked_config, chained
from flows.environment import chosen_root, existing_root
from flows.requests import PipelineRequest, StageRequest

#: Parameters that select the config or run of a deployment.
_SUBJECTS = ("config", "run", "root")
#: Maximum number of runs that a message names.
_NAMED = 10
_ROOT: str = StageRequest.model_fields["root"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The flow parameters of one requested deployment."""

    usual: Mapping[str, Any]
    """Parameters in ``prefect.yaml``."""
    there: Mapping[str, Any] | None
    """Current parameters of an existing deployment; None for a new one."""
    given: Mapping[str, Any]
    """Parameters of the command that the flow takes."""
    defaults: Mapping[str, Any]
    """Fallback parameters of a new deployment."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """The resulting parameters of the flow."""
        before = {**self.usual, **self.defaults} if self.there is None else self.there
        return {**before, **self.given}

    @property
    def changes(self) -> bool:
        """Whether the command selects the deployment's config or run."""
        return self.there is None or any(name in self.given for name in _SUBJECTS)


def usual_subject(wanted: Sequence[Wanted], *, here: bool) -> Mapping[str, Any]:
    """Return the default run, and its root, of new deployments when the command names no run.

    It is the run of the config that the command names, else the only run in the store.

    Args:
        wanted: the deployments.
        here: whether their workers see this machine's files; containers do not.

    Raises:
        ConfigError: the config cannot run, or the store holds no run or several.
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
    """Check that the configs and runs that a command selects exist; unchanged deployments are not checked.

    A run may be missing if the same command deploys the config that makes it.

    Args:
        wanted: the deployments.
        here: see ``usual_subject``; configs and stores that cannot be read here are not checked.

    Raises:
        ConfigError: a config is missing, unreadable, or cannot run.
        PromptError: a prompt source cannot be used.
        StoreError: a run or the store is missing.
    """
    touched = [each.asked for each in wanted if each.changes]
    configs = [asked for asked in _distinct(touched, "config") if _can_read(asked, here=here)]
    coming = {checked_config(asked).run.name for asked in configs}
    for asked in _distinct(touched, "run"):
        root = str(asked.get("root", _ROOT))
        if asked["run"] not in coming and _can_look(root, here=here):
            _check_run(str(asked["run"]), root)


def checked_config(asked: Mapping[str, Any]) -> RunConfig:
    """Return the config of a pipeline's request, after the checks of ``flowmill check``.

    Raises:
        ConfigError: it is missing, unreadable, or cannot run.
        PromptError: a prompt source cannot be used.
    """
    overrides, root = list(asked.get("overrides") or ()), chosen_root(asked.get("root"))
    requests = chained(
        PipelineRequest(config=str(asked["config"]), overrides=overrides, root=root, name=asked.get("name"))
    )
    from tasks.checks.check import check_config
    from tasks.checks.names import check_names

    for each in requests:
        config = asked_config(each)
        check_names(config, source=Path(each.config), overrides=each.overrides)
        check_config(config, rewards=False)
    return config


def _distinct(touched: Sequence[Mapping[str, Any]], subject: str) -> Iterator[Mapping[str, Any]]:
    """Yield the requests with distinct subjects, the first of each."""
    seen = set()
    for asked in touched:
        key = tuple(str(asked.get(name)) for name in (subject, "root", "name", "overrides"))
        if subject in asked and key not in seen:
            seen.add(key)
            yield asked


def _can_read(asked: Mapping[str, Any], *, here: bool) -> bool:
    """Return whether this machine can read the config as the worker does."""
    return here or asked["config"] in presets()


def _can_look(root: str, *, here: bool) -> bool:
    """Return whether this machine can read the store as the worker does."""
    return here or "://" in root


def _check_run(name: str, root: str) -> None:
    from storage.artifacts.commit import ArtifactStore
    from tasks.runs.opening import require_run

    require_run(ArtifactStore(existing_root(root)), name)


def _only_run(root: str) -> str:
    from storage.artifacts.commit import ArtifactStore
    from storage.artifacts.lineage import list_runs

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
        "with --run which one the deployments are for; --name gives those of another run a separate name."
    )
