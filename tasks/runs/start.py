"""The policy of another run that a run starts from: resolved once, when the run begins.

The stage ``policy`` copies its weights, so a run needs the other one no longer than until then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import command
from flowmill.configs.load import parse_config
from flowmill.configs.roots import root_option
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder, list_runs
from flowmill.storage.backends import may_exist
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.store_trust import READ, check_trusted
from flowmill.tasks.inputs.weight_sources import Weights, chosen_weights
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.component_requirements import knowing_needs
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.specs.run_inputs import RunInputs


def started_from(store: ArtifactStore, config: RunConfig) -> dict[str, Any]:
    """Return the policy that ``model.start`` names: artifact, digest, file of weights (None: the base model), base."""
    name, _, epoch = str(config.model.start).rpartition("@")
    source = _chain(store, name)
    entry = source.find(*policy_after(int(epoch)))
    if entry is None:
        raise ConfigError(
            f"model.start: run '{name}' has no policy after epoch {epoch}; its last is that after epoch "
            f"{source.trained()}. Name another epoch, or train it further: "
            f"{command('flowmill', 'run', 'CONFIG', '--name', name, *root_option(store.root.uri))}"
        )
    base = source.require(0, "base").ref
    # The commit of a hub id is compared when the base model is there, by the stage ``policy``.
    ours, theirs = config.model, source.config.model
    is_hub = ours.path is not None and not Path(ours.path).is_dir()
    own = Chain(RunInputs(store, config, RunFolder(store, str(config.run.name))))
    _check_alike(config, source.config, ours.path == theirs.path if is_hub else own.target(Node(0, "base")) == base)
    weights = chosen_weights(store, entry.ref, Weights.AVERAGE)
    return {
        "policy": entry.artifact,
        "digest": store.require(entry.ref).digest,
        "weights": None if weights is None else weights.value,
        "base": str(base),
    }


def check_start(config: RunConfig) -> None:
    """Check that the policy that ``model.start`` names exists and fits; a run that has begun has its own copy."""
    if not may_exist(config.store):
        raise ConfigError(
            f"model.start is '{config.model.start}', but there is no store at '{config.store.root}'. Train that run "
            "first, in the same store."
        )
    if not has_begun(config):
        started_from(ArtifactStore(config.store), config)


def has_begun(config: RunConfig) -> bool:
    """Return whether the run of a config has recorded the policy that it starts from."""
    if not may_exist(config.store):
        return False
    return "start" in (RunFolder(ArtifactStore(config.store), str(config.run.name)).describe() or {})


def check_first(config: RunConfig, first: RunConfig) -> None:
    """Check before any work that the run of ``model.start_config`` will have the policy that a run starts from."""
    name, _, epoch = str(config.model.start).rpartition("@")
    wrong = f"is run '{first.run.name}'" if first.run.name != name else f"has {first.run.epochs} epochs"
    if first.run.name != name or first.run.epochs < int(epoch):
        raise ConfigError(
            f"model.start is '{config.model.start}', but model.start_config '{config.model.start_config}' {wrong}. "
            "Name one of its epochs, or another config."
        )
    sources = [each.model.model_dump(include={"path", "revision", "single_file", "build"}) for each in (config, first)]
    _check_alike(config, first, sources[0] == sources[1])


def _chain(store: ArtifactStore, name: str) -> Chain:
    run = RunFolder(store, name)
    record = run.config()
    if record is None:
        names = list_runs(store)
        raise ConfigError(
            f"model.start: there is no run '{name}' in '{store.root.uri}'. "
            + (did_you_mean(name, names) if names else "Train it first, in the same store.")
        )
    config = parse_config(record, where=f"run '{name}'")
    check_trusted(config, config, run=name, only=READ, consent="")
    return Chain(RunInputs(store, knowing_needs(config, run, trusted=False), run, reads=True))


def _check_alike(config: RunConfig, first: RunConfig, same: bool) -> None:
    """Check that a run trains the same weights of the same model as the run that it starts from.

    Args:
        first: of the run that it starts from.
        same: whether their base models are equal.
    """
    ours, theirs, name = config.model, first.model, first.run.name
    if ours.policy != theirs.policy or not same:
        raise ConfigError(
            f"model.start: run '{name}' trains another base model ({theirs.policy}, {theirs.base_name}) than this "
            f"config ({ours.policy}, {ours.base_name}). Repeat its section model, or export it and set model.path."
        )
    begun = theirs.lora is not None and theirs.lora.start is not None
    adapters, own = ("files" if begun else ResolvedConfig(first).lora), ResolvedConfig(config).lora
    if adapters != own:
        trained = "all weights" if adapters is None else f"adapters ({theirs.lora.brief()})" if theirs.lora else ""
        raise ConfigError(
            f"model.start: run '{name}' trains {trained}, this config "
            f"{'all weights' if ours.lora is None else f'adapters ({ours.lora.brief()})'}. Set model.lora as in that "
            "run, or export it and set model.path or model.lora.start."
        )
