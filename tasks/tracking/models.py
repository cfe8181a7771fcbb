"""Evaluated policies as logged models that can be ranked, and exported policies as versions in the registry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from flowmill.configs.escaping import in_markdown
from flowmill.tasks.metrics.tracked import EvaluationContent
from flowmill.tasks.tracking.names import epoch_digits, mlflow_name, mlflow_text

SUPERSEDED = "flowmill.superseded"
"""Tag of runs and versions that are superseded."""
#: Tags of a version's held-out reward, and of the weighted sum that it is.
_REWARD, _REWARDS = "flowmill.heldout_reward", "flowmill.rewards"
#: Suffix of the names of superseded runs that stay because models were registered from them.
_PAST = " (superseded)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that owns the models."""

    run: str
    run_id: str
    experiment_id: str
    kind: str
    """Kind of training: lora or full."""
    rewards: str
    """The weighted sum of rewards that held-out rewards are: equal for equal sums only."""
    earlier: frozenset[str] = frozenset()
    """Ids of its MLflow runs before: another store may have a run of its name."""


def logged_model(client: MlflowClient, owner: Owner, evaluation: EvaluationContent) -> Any:
    """Return the logged model of an evaluated policy, created if needed; metrics that name it rank it."""
    model = _find(client, owner, evaluation) or _new_model(client, owner, evaluation)
    if model.status == LoggedModelStatus.READY:
        return model
    # New, or left by a process that was killed here.
    outputs = client.get_run(owner.run_id).outputs.model_outputs
    if model.model_id not in {each.model_id for each in outputs}:
        client.log_outputs(owner.run_id, [LoggedModelOutput(model.model_id, evaluation.epoch)])
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def _new_model(client: MlflowClient, owner: Owner, evaluation: EvaluationContent) -> Any:
    tags = {
        "flowmill.run": owner.run,
        "flowmill.epoch": str(evaluation.epoch),
        "flowmill.policy": evaluation.policy,
        "flowmill.evaluation": evaluation.identity,
    }
    return client.create_logged_model(
        owner.experiment_id,
        # Run names may contain dots, names of MLflow's logged models may not.
        name=mlflow_name("logged model", f"{owner.run.replace('.', '-')}-epoch-{epoch_digits(evaluation.epoch)}"),
        source_run_id=owner.run_id,
        tags=tags,
        params={"epoch": str(evaluation.epoch), "trained": owner.kind},
        model_type=f"policy-{owner.kind}",
    )


def put_away(client: MlflowClient, experiment_id: str, run_id: str) -> bool:
    """Move a superseded run and its logged models to the trash; return whether the run is there.

    A run with versions of registered models stays, renamed, with the models of those versions, so that links from
    published versions stay valid.
    """
    client.set_tag(run_id, SUPERSEDED, "true")
    versions = list(client.search_model_versions(f"run_id = '{run_id}'"))
    published = {version.tags.get("flowmill.logged_model") for version in versions}
    for model in _of_run(client, experiment_id, run_id):
        # Models in the trash are not ranked.
        if model.model_id not in published:
            client.delete_logged_model(model.model_id)
    if not versions:
        client.delete_run(run_id)
        return True
    run = client.get_run(run_id)
    status = "KILLED" if run.info.status == "RUNNING" else None
    name = f"{(run.info.run_name or run_id).removesuffix(_PAST)}{_PAST}"
    client.update_run(run_id, status=status, name=mlflow_name("run", name))
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported model."""

    epoch: int
    folder: Path
    digest: str
    policy: str
    """``kind/id`` of the policy the run ends with as it is now."""


def register(client: MlflowClient, owner: Owner, name: str, evaluation: EvaluationContent, export: Export) -> bool:
    """Register an exported model as a version of a registered model; set the alias ``champion`` to the best version.

    For each run that shares the registered model only the version of its final policy counts; its other versions are
    tagged as superseded. So the alias does not depend on earlier lengths of the run. It never points to a version of a
    deleted MLflow run. Sums of other rewards, or with other weights, do not compare: only versions of the same sum
    compete. One without a reward, or of an earlier release, which does not say its sum, competes with all.

    Returns:
        whether the alias left a version of another sum.
    """
    _ensure_model(client, name)
    versions = list(client.search_model_versions(f"name = '{name}'"))
    own = [version for version in versions if version.run_id in owner.earlier | {owner.run_id}]
    of_run = [version for version in own if version.run_id == owner.run_id]
    same = [version for version in of_run if version.tags.get("flowmill.digest") == export.digest]
    if not same:
        of_run.append(_new_version(client, owner, name, evaluation, export))
        own.append(of_run[-1])
    _note_version(client, owner, (same or of_run)[-1])
    current = [version for version in of_run if version.tags.get("flowmill.policy") == export.policy]
    for version in own:
        _supersede(client, version, version not in current)
    others = [version for version in versions if version not in own and SUPERSEDED not in version.tags]
    others = [version for version in others if _is_there(client, version.run_id)]
    sums = {owner.rewards, None}
    equal = [version for version in others if evaluation.reward is None or version.tags.get(_REWARDS) in sums]
    # The first of equal versions wins.
    ranked = [(float(each.tags.get(_REWARD, "-inf")), -int(each.version)) for each in current + equal]
    current_champion = _champion(client, name)
    if ranked and current_champion != str(-max(ranked)[1]):
        client.set_registered_model_alias(name, "champion", str(-max(ranked)[1]))
    return bool(ranked) and current_champion in {str(version.version) for version in others if version not in equal}


def _supersede(client: MlflowClient, version: Any, superseded: bool) -> None:
    if superseded and SUPERSEDED not in version.tags:
        client.set_model_version_tag(version.name, version.version, SUPERSEDED, "true")
    elif not superseded and SUPERSEDED in version.tags:
        client.delete_model_version_tag(version.name, version.version, SUPERSEDED)


def _new_version(client: MlflowClient, owner: Owner, name: str, evaluation: EvaluationContent, export: Export) -> Any:
    model = logged_model(client, owner, evaluation)
    tags = {
        "flowmill.digest": export.digest,
        "flowmill.epoch": str(export.epoch),
        "flowmill.run": owner.run,
        **({} if evaluation.reward is None else {_REWARDS: owner.rewards, _REWARD: repr(evaluation.reward)}),
        "flowmill.policy": evaluation.policy,
        "flowmill.logged_model": model.model_id,
    }
    scores = [
        f"{in_markdown(point.key.removeprefix('eval/'))} {point.value:.3f}"
        for point in evaluation.points
        if point.split
    ]
    client.log_model_artifacts(model.model_id, str(export.folder))
    return client.create_model_version(
        name,
        source=model.artifact_location,
        run_id=owner.run_id,
        model_id=model.model_id,
        tags=tags,
        description=mlflow_text(
            f"Run '{in_markdown(owner.run)}', epoch {export.epoch}. Logged model {model.model_id} has the scores. "
            f"Evaluation: {', '.join(scores)}."
        ),
    )


def _note_version(client: MlflowClient, owner: Owner, version: Any) -> None:
    """Note in a logged model, if it still exists, its registered version, as ``mlflow.register_model`` does."""
    entry = {"name": version.name, "version": version.version}
    for model in _of_run(client, owner.experiment_id, owner.run_id):
        recorded = json.loads(model.tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
        if model.model_id == version.tags.get("flowmill.logged_model") and entry not in recorded:
            client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: json.dumps([*recorded, entry])})


def _find(client: MlflowClient, owner: Owner, evaluation: EvaluationContent) -> Any:
    expected = (evaluation.policy, evaluation.identity)
    for model in _of_run(client, owner.experiment_id, owner.run_id):
        if (model.tags.get("flowmill.policy"), model.tags.get("flowmill.evaluation")) == expected:
            return model
    return None


def _of_run(client: MlflowClient, experiment_id: str, run_id: str) -> Sequence[Any]:
    models, token = [], None
    while True:
        page = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", page_token=token)
        models += list(page)
        token = page.token
        if not token:
            return models


def _is_there(client: MlflowClient, run_id: str) -> bool:
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _ensure_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _champion(client: MlflowClient, name: str) -> str | None:
    try:
        return str(client.get_model_version_by_alias(name, "champion").version)
    except MlflowException:
        return None
