"""The configs and runs that deployments work on, checked before any deployment is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.presets import presets
from flowmill.configs.schema import RunConfig
from flowmill.flows.chained import chained, resolved_config
from flowmill.flows.environment import chosen_root, existing_root
from flowmill.flows.requests import PipelineRequest, StageRequest

#: Parameters that select the config or run of a deployment.
SUBJECTS = ("config", "run", "root")
#: Maximum number of runs that a message names.
_NAMED = 10
_ROOT: str = StageRequest.model_fields["root"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The flow parameters of one requested deployment."""

    usual: Mapping[str, Any]
    there: Mapping[str, Any] | None
    """Current parameters of an existing deployment; None for a new one."""
    requested: Mapping[str, Any]
    """Parameters of the command that the flow takes."""
    defaults: Mapping[str, Any]
    """Fallback parameters of a new deployment."""
    moved: bool
    """Whether an existing deployment gets another folder, in which its config and run must exist."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The resulting parameters of the flow."""
        before = {**self.usual, **self.defaults} if self.there is None else self.there
        return {**before, **self.requested}

    @property
    def changes(self) -> bool:
        """Whether the command selects the deployment's config or run, or the folder of both."""
        return self.there is None or self.moved or any(name in self.requested for name in SUBJECTS)


def usual_subject(subjects: Sequence[Subject], *, here: bool) -> Mapping[str, Any]:
    """Return the default run, and its root, of new deployments when the command names no run.

    It is the run of the config that the command names, else the only run in the store.

    Args:
        here: whether their workers see this machine's files; containers do not.
    """
    new = [each for each in subjects if each.there is None and "run" in each.usual and "run" not in each.requested]
    if not new:
        return {}
    config = next((each for each in subjects if "config" in each.requested), None)
    if config is not None and _can_read(config.parameters, here=here):
        checked = checked_config(config.parameters)
        return {"run": checked.run.name, "root": str(checked.store.root)}
    root = str(new[0].parameters.get("root", _ROOT))
    if config is not None or not _can_look(root, here=here):
        raise ConfigError("Say with --run which run the deployments are for: their workers' files cannot be read here.")
    return {"run": _only_run(root)}


def check_subjects(subjects: Sequence[Subject], *, here: bool) -> None:
    """Check that the configs and runs that a command selects exist; unchanged deployments are not checked.

    A run may be missing if the same command deploys the config that creates it.

    Args:
        here: see ``usual_subject``; configs and stores that cannot be read here are not checked.
    """
    touched = [each.parameters for each in subjects if each.changes]
    configs = [request for request in _distinct(touched, "config") if _can_read(request, here=here)]
    coming = {checked_config(request).run.name for request in configs}
    for request in _distinct(touched, "run"):
        root = str(request.get("root", _ROOT))
        if request["run"] not in coming and _can_look(root, here=here):
            _check_run(str(request["run"]), root)


def checked_config(request: Mapping[str, Any]) -> RunConfig:
    """Return the config of a pipeline's request, after the checks of ``flowmill check``."""
    overrides, root = list(request.get("overrides") or ()), chosen_root(request.get("root"))
    requests = chained(
        PipelineRequest(config=str(request["config"]), overrides=overrides, root=root, name=request.get("name"))
    )
    from flowmill.tasks.checks.check import check_config
    from flowmill.tasks.checks.names import check_names
    from flowmill.tasks.inputs.shapes import with_columns

    for each in requests:
        config = resolved_config(each)
        check_names(config, source=Path(each.config), overrides=each.overrides)
        config = with_columns(config)
        check_config(config, rewards=False)
    return config


def _distinct(touched: Sequence[Mapping[str, Any]], subject: str) -> Iterator[Mapping[str, Any]]:
    seen = set()
    for request in touched:
        key = tuple(str(request.get(name)) for name in (subject, "root", "name", "overrides"))
        if subject in request and key not in seen:
            seen.add(key)
            yield request


def _can_read(request: Mapping[str, Any], *, here: bool) -> bool:
    """Return whether this machine can read the config as the worker does."""
    return here or request["config"] in presets()


def _can_look(root: str, *, here: bool) -> bool:
    """Return whether this machine can read the store as the worker does."""
    return here or "://" in root


def _check_run(name: str, root: str) -> None:
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.tasks.runs.opening import require_run

    require_run(ArtifactStore(existing_root(root)), name)


def _only_run(root: str) -> str:
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.storage.artifacts.lineage import list_runs

    where = existing_root(root)
    runs = list_runs(ArtifactStore(where))
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise ConfigError(
            f"'{where}' holds no run for the deployments to work on. Start one with 'flowmill run', or name the config "
            "that makes it with --config, or another store with --root."
        )
    raise ConfigError(
        f"'{where}' holds {len(runs)} runs: {', '.join(runs[:_NAMED])}{', ...' if len(runs) > _NAMED else ''}. Say "
        "with --run which one the deployments are for; --name gives those of another run a separate name."
    )
