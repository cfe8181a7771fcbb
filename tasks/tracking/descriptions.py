"""The description of an MLflow run: experiment, parameters, text, prompts, commit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.configs.escaping import in_link, in_markdown
from flowmill.configs.load import flatten
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.prompts import list_name
from flowmill.tasks.metrics.alerts import TAG, alert_tag, alerts
from flowmill.tasks.metrics.tracked import paragraphs
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.tracking.names import mlflow_name, mlflow_text

if TYPE_CHECKING:
    from mlflow import MlflowClient


#: MLflow's tag for a child run.
PARENT = "mlflow.parentRunId"


def describe(client: MlflowClient, run_id: str, context: RunContext, orchestrator: Mapping[str, str]) -> None:
    """Log the description of a run once: parameters, the whole config, prompts, the code's commit.

    Each part is checked separately, because an earlier failure may have left out any of them.
    """
    from mlflow.entities import Param, RunTag

    source = {"mlflow.source.name": "flowmill run", "mlflow.source.type": "LOCAL"}
    settings = further_settings(context.config)
    tags = {"flowmill.run": context.run.name, **settings, **source, **orchestrator}
    alerted = alert_tag(context.chain)
    if alerted:
        tags[TAG] = alerted
    if context.config.tracking.parent is not None:
        tags[PARENT] = context.config.tracking.parent
    commit = _git_commit()
    if commit:
        tags["mlflow.source.git.commit"] = commit
    tags["mlflow.note.content"] = with_link(description(context, done=False), orchestrator)
    recorded = client.get_run(run_id)
    params = {} if recorded.data.params else parameters(context.config)
    client.log_batch(
        run_id,
        tags=[RunTag(mlflow_name("tag", key), mlflow_text(value)) for key, value in tags.items()],
        params=[Param(mlflow_name("param", key), value) for key, value in params.items()],
    )
    client.log_text(run_id, context.config.to_yaml(), "config.yaml")
    logged = {each.dataset.name for each in recorded.inputs.dataset_inputs}
    missing = [each for each in _dataset_inputs(context) if each.dataset.name not in logged]
    if missing:
        client.log_inputs(run_id, missing)


def with_link(text: str, orchestrator: Mapping[str, str]) -> str:
    """Return a description with a link to the orchestrator's run, if there is one: MLflow renders links only there."""
    url, flow_run = orchestrator.get("prefect.flow_run_url"), orchestrator.get("prefect.flow_run_id")
    if not flow_run:
        return text
    name = f"Prefect flow run {flow_run}"
    return f"{text}\n\n{in_link(name, url) if url else f'{in_markdown(name)}; `flowmill ui` shows it.'}"


def description(context: RunContext, *, done: bool) -> str:
    """Return ``paragraphs`` and alerts in Markdown."""
    introduction, *results = map(in_markdown, paragraphs(context, done=done))
    # Warnings come early because the page folds the text after a few lines.
    warnings = [f"**Warning**: {in_markdown(alert.text)}" for alert in alerts(context.chain)]
    return "\n\n".join([f"**{in_markdown(context.run.name)}** {introduction}", *warnings, *results])


def experiment(client: MlflowClient, context: RunContext) -> str:
    """Return the id of the experiment, which MLflow shows as model training; created if needed."""
    from flowmill.tasks.tracking.client import RELATIVE

    name, local = mlflow_name("experiment", context.config.tracking.experiment), context.config.tracking.uri is None
    existing = client.get_experiment_by_name(name)
    if existing is not None and local and not existing.artifact_location.startswith(RELATIVE):
        # From an earlier version with absolute locations: it stays readable in its place.
        client.rename_experiment(existing.experiment_id, f"{name} until {time.strftime('%Y-%m-%d %H:%M:%S')}")
        existing = None
    if existing is not None:
        return str(existing.experiment_id)
    location = f"{RELATIVE}/{mlflow_name('folder', name)}" if local else None
    kind = {"mlflow.experimentKind": "custom_model_development"}
    return str(client.create_experiment(name, artifact_location=location, tags=kind))


def datasets(context: RunContext) -> dict[str, tuple[str, str]]:
    """Return name and digest of each prompt list."""
    prompts = context.config.prompts
    digest = context.prompts_identity
    lists = {"train": prompts.lists("train"), "heldout": prompts.lists("heldout")}
    named = {
        split: "+".join(Path(list_name(each)).stem for each in sources.values()) for split, sources in lists.items()
    }
    return {split: (mlflow_name("dataset", name), digest[:32]) for split, name in named.items() if name}


def _dataset_inputs(context: RunContext) -> list[Any]:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    manifest = context.store.manifest(context.chain.ref(Node(0, "preprocess")))
    columns = [{"type": "string", "name": name, "required": True} for name in ("prompt_id", "prompt", "metadata")]
    inputs = []
    for split, (name, digest) in datasets(context).items():
        rows = {} if manifest is None else {"num_rows": manifest.summary[split]}
        dataset = Dataset(
            name=name,
            digest=digest,
            source_type="flowmill",
            source=json.dumps({"artifact": str(context.chain.ref(Node(0, "preprocess"))), "split": split}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps(rows),
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", str(split))]))
    return inputs


def _git_commit() -> str | None:
    """Return the commit of the working directory, None outside a repository."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


#: Settings logged as parameters, the others are tags: MLflow shows all parameters above each image grid.
_PARAMETERS = (
    *("algorithm", "base", "trained", "rewards", "rollout.prompts_per_epoch", "rollout.group_size"),
    *("optimize.learning_rate", "run.seed"),
)
#: Maximum number of logged settings.
_MOST = 20
_MAX_LENGTH = 500


def parameters(config: RunConfig) -> dict[str, str]:
    """Return the few settings that are logged as parameters."""
    return {key: value for key, value in _settings(config).items() if key in _PARAMETERS}


def further_settings(config: RunConfig) -> dict[str, str]:
    """Return the other settings for comparing runs: the main ones, then those that differ from the defaults.

    Settings that may change between invocations of a run are excluded.
    """
    return {key: value for key, value in _settings(config).items() if key not in _PARAMETERS}


def _settings(config: RunConfig) -> dict[str, str]:
    flat = flatten(config.model_dump(mode="json"))
    chosen = {name: value for name, value in _main_settings(config).items() if value is not None}
    plain = flatten(
        RunConfig(model=config.model, prompts=config.prompts, data=config.data, rewards=config.rewards).model_dump(
            mode="json"
        )
    )
    for key, value in flat.items():
        section = key.split(".")[0]
        named = key in chosen or section in ("model", "prompts", "data", "rewards", "store", "run", *_FREE)
        if (
            len(chosen) < _MOST
            and not named
            and plain.get(key) != value
            and key not in _RENAMED
            and not key.startswith(_KEPT)
        ):
            chosen[key] = value
    return {key: str(value)[:_MAX_LENGTH] for key, value in list(chosen.items())[:_MOST]}


_FREE = ("evaluate", "export", "execution", "tracking")
#: Settings logged under another name.
_RENAMED = ("optimize.algorithm.name", "rollout.sampler.name", "rollout.plan.name")
#: Settings of storage, which are not logged.
_KEPT = ("rollout.groups_per_shard", "rollout.store", "rollout.media.", "rollout.latents_dtype")


def _main_settings(config: RunConfig) -> dict[str, Any]:
    model, rollout, optimize = config.model, config.rollout, config.optimize
    lora = model.lora
    return {
        "algorithm": optimize.algorithm.name,
        "base": model.base_name,
        "family": model.policy,
        "model.quantize.name": model.quantizer,
        "trained": "all weights" if lora is None else f"LoRA {lora.brief()}",
        "rewards": ", ".join(reward.weighted for reward in config.rewards),
        "sampler": rollout.sampler.name,
        "plan": rollout.plan.name,
        "rollout.steps": rollout.steps,
        "rollout.prompts_per_epoch": rollout.prompts_per_epoch,
        "rollout.group_size": rollout.group_size,
        "model.guidance_scale": model.guidance_scale,
        "optimize.learning_rate": optimize.learning_rate,
        "optimize.updates_per_epoch": optimize.updates_per_epoch,
        "run.seed": config.run.seed,
    }
