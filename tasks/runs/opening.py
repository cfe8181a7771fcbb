"""Starting, resuming and describing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.errors import RunConflictError, StoreError
from configs.fingerprint import fingerprint
from configs.load import asks_for, differences, flatten, override_config, parse_config
from configs.model import ModelSection
from configs.override_quoting import text_override
from configs.schema import RunConfig
from configs.suggestions import did_you_mean
from storage import layout
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import RunFolder, list_runs
from tasks.inputs.prompts import prompts_fingerprint, source_prompts
from tasks.inputs.store_trust import READ, check_trusted, remember
from tasks.inputs.weight_sources import model_identity
from tasks.runs.component_requirements import knowing_needs, note_needs
from tasks.runs.context import RunContext
from tasks.runs.locks import FINISHED, run_name
from tasks.runs.moves import Moves, as_before, moved
from tasks.runs.progress import Reporter
from tasks.specs.graph import RENDERER

_CUT = "rollout.groups_per_shard"


def begin_run(config: RunConfig, *, reporter: Reporter | None = None) -> RunContext:
    """Create the run a config describes, or bind to it when it exists with the same settings.

    The config becomes the run's: with fewer epochs, or another evaluation, it is another chain over the same artifacts.

    Raises:
        RunConflictError: a run of this name exists with other settings.
        StoreError: the root cannot be used.
        PromptError: a prompt source cannot be used.
    """
    context = find_run(config, reporter=reporter)
    if context is None:
        store = ArtifactStore(config.store)
        run = RunFolder(store, run_name(config))
        if not run.create(_record(config)):
            # Another process created it since; it is bound to only if it is the same.
            if run.describe() is None:
                raise StoreError(
                    f"'{layout.run_record(run.name)}' in '{store.root.uri}' exists but is no record. "
                    "Remove it, or give the run another name with --name."
                )
            return begin_run(config, reporter=reporter)
        context = RunContext(store, config, run, reporter=reporter)
    else:
        context.run.restore(_record(config))
    context.run.add("configs", recorded(config))
    note_needs(context.run, config)
    return context


def find_run(config: RunConfig, *, reporter: Reporter | None = None) -> RunContext | None:
    """Bind to the run a config describes if it exists with the same settings; None if it does not exist.

    Raises:
        RunConflictError: a run of this name exists with other settings.
        StoreError: the root cannot be used.
        PromptError: a prompt source cannot be used.
    """
    store = ArtifactStore(config.store)
    run = RunFolder(store, run_name(config))
    changed = conflicts(run, config)
    if changed is None:
        return None
    refuse_other_settings(config, changed)
    return RunContext(store, config, run, reporter=reporter)


def refuse_other_settings(config: RunConfig, changed: Sequence[str]) -> None:
    """Refuse to go on with a run under settings that make it another.

    Raises:
        RunConflictError: there are some.
    """
    if changed:
        raise RunConflictError(
            f"Run '{run_name(config)}' exists in '{ArtifactStore(config.store).root.uri}' with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive this one another name with --name; what the two have in common is not computed again."
        )


def conflicts(run: RunFolder, config: RunConfig) -> list[str] | None:
    """Return the settings in which an existing run differs for good; None if the run does not exist.

    Raises:
        PromptError: a prompt source cannot be used.
    """
    first, newest = run.describe(), run.config()
    if newest is None:
        return None
    before = parse_config(first["config"] if first else newest, where=f"run '{run.name}'")
    same = moved(run.store, run, before, config)
    changed = differences(before.model_dump(mode="json"), config.model_dump(mode="json"), same=same)
    if first is not None and first["prompts"] != _prompts_identity(config):
        changed.append("prompts: the prompt files hold other prompts now")
    return changed


def open_run(
    root: str,
    name: str,
    *,
    overrides: Sequence[str] = (),
    reporter: Reporter | None = None,
    epoch: int = 0,
    reads: bool = False,
    trusted: bool = False,
) -> RunContext:
    """Bind to an existing run with the config it was last started with, and some overrides.

    Args:
        root: the store.
        name: the run.
        overrides: ``section.key=value`` strings for one stage.
        reporter: shows progress.
        epoch: epoch of that stage.
        reads: nothing is made; see ``RunContext``.
        trusted: use code, commands, addresses and paths that only the store's record of the run names.

    Raises:
        StoreError: there is no such run, or the root cannot be used.
        ConfigError: an override is not valid.
        TrustError: the store names code or commands that nobody here has asked for, or names an algorithm and does
            not say what that needs.
    """
    # Where the store and its copies are is this machine's to say, whatever a record holds.
    written = require_run(ArtifactStore(root), name)
    found = written.config() or {}
    stored = parse_config({key: value for key, value in found.items() if key != "store"}, where=f"run '{name}'")
    if reads:
        stored = knowing_needs(stored, written, trusted=trusted)
    config = override_config(stored, [text_override("store.root", root), *overrides])
    if not trusted:
        check_trusted(stored, config, run=name, only=READ if reads else None)
    store = ArtifactStore(config.store, remembers=reads)
    run = RunFolder(store, name)
    return RunContext(store, config, run, reporter=reporter, epoch=epoch, reads=reads)


def require_run(store: ArtifactStore, name: str) -> RunFolder:
    """Return a run that must exist.

    Raises:
        StoreError: it does not.
    """
    run = RunFolder(store, name)
    if run.config() is None:
        names = list_runs(store)
        hint = did_you_mean(name, names) if names else "The store holds no runs yet; start one with 'flowmill run'."
        raise StoreError(f"There is no run '{name}' in '{store.root.uri}'. {hint}")
    return run


def mark_finished(context: RunContext, result: Mapping[str, Any]) -> None:
    """Write down that everything this config asks for is committed, as which artifacts, and what came of it."""
    entries = [entry for entry in context.chain.entries() if entry.ref.kind != "embeddings"]
    artifacts = [[*entry.key, entry.artifact] for entry in entries]
    made = _attempts(context.run, artifacts)
    context.run.add(_finished(context, context.config), {"artifacts": artifacts, "made": made, "result": dict(result)})


def finished_result(context: RunContext) -> dict[str, Any] | None:
    """Return what came of the run if everything this config asks for is committed, else None; no model is loaded.

    A hub id without a revision may stand for another model by now, so such runs are never short-cut.
    """
    run = context.run
    if any(model.path is not None and model.revision is None and not _is_local(model) for model in _models(context)):
        return None
    stored = run.config()
    if stored is None:
        return None
    # As an earlier version wrote it, it may lack settings that have a default today.
    own = parse_config(stored, where=f"run '{run.name}'")
    moves = moved(context.store, run, own, context.config)
    asked = as_before(context.config, moves)
    note = run.newest(_finished(context, asked, moves)) or run.newest(_finished_once(context, stored, moves))
    if note is None:
        return None
    if _wanted(recorded(own)) != _wanted(recorded(asked)) or _attempts(run, note["artifacts"]) != note["made"]:
        return None
    refs = [ArtifactRef.parse(artifact) for *_, artifact in note["artifacts"]]
    return dict(note["result"]) if all(context.store.manifest(ref) is not None for ref in refs) else None


def note_moves(context: RunContext) -> None:
    """Write down where the files of a finished run are now, for commands that know the run by its record alone."""
    stored = context.run.config()
    if stored is not None:
        own = parse_config(stored, where=f"run '{context.run.name}'")
        if moved(context.store, context.run, own, context.config):
            remember(context.config)
            context.run.add("configs", recorded(context.config))


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return a config as a run keeps it: where its store is, is not part of it, so a store can be moved."""
    return config.model_dump(mode="json", exclude={"store"})


def _record(config: RunConfig) -> dict[str, Any]:
    identity = {"prompts": _prompts_identity(config), "preprocess": prompts_fingerprint(source_prompts(config))}
    return {"config": recorded(config), **identity, "schema_version": 2}


def _prompts_identity(config: RunConfig) -> str:
    sources = source_prompts(config)
    return prompts_fingerprint({split: sources[split] for split in ("train", "heldout") if sources[split]})


def _finished(context: RunContext, config: RunConfig, moves: Moves = MappingProxyType({})) -> str:
    """Return the series of records that say a config is finished: of settings with their default, none is in its name.

    So a setting that the next version adds leaves what is finished finished.

    Args:
        context: the run, as it is given.
        config: the same with the paths of the run.
        moves: the paths in which the two differ.
    """
    return _series(context, config.model_dump(mode="json", exclude={"store"}, exclude_defaults=True), moves)


def _finished_once(context: RunContext, stored: Mapping[str, Any], moves: Moves) -> str:
    """Return how flowmill 0.1.0 named that series: by every setting it knew, which are those of the stored config."""
    return _series(context, stored, moves)


def _series(context: RunContext, settings: Mapping[str, Any], moves: Moves) -> str:
    # Where shards are cut was part of the name before anybody could leave it open.
    wanted = _wanted(settings) | {key: value for key, value in flatten(settings).items() if key == _CUT}
    for name, slot, model in zip(("model.path", "render.model.path"), ("", RENDERER), _models(context), strict=False):
        if _is_local(model):
            wanted[name] = model_identity(str(model.path), None)
        if model.single_files:
            wanted[f"{name}, files"] = context.single_file_identity(model, slot)
    return f"{FINISHED}{fingerprint({**wanted, **_begun_as(context, moves)})[:16]}"


def _begun_as(context: RunContext, moves: Moves) -> dict[str, Any]:
    """Return what is read beside the base model, by setting: paths name it, but it is known by its bytes."""
    model, found = context.config.model, dict[str, Any]()
    if model.checkpoint is not None:
        found["model.checkpoint"] = context.checkpoint_identity
    if model.lora is not None and model.lora.start is not None:
        found["model.lora.start"] = context.adapter_identity
    if context.config.critic.path is not None:
        found["critic.path"] = context.critic_identity
    before = {new: old for old, new in moves.values()}
    for setting, held in context.contents.all().items():
        found[f"{setting}, contents"] = {before.get(path, path): digest for path, digest in held.items()}
    return found


def _models(context: RunContext) -> list[ModelSection]:
    """Return the models of a run: that which is trained, and that which draws."""
    render = context.config.render
    return [context.config.model, *([] if render is None else [render.model])]


def _is_local(model: ModelSection) -> bool:
    return model.path is not None and Path(model.path).is_dir()


def _wanted(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asks_for(config).items() if not _by_content(key)}


def _attempts(run: RunFolder, artifacts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return all that was ever made of what artifacts stand for; what was made beside them does not matter."""
    works = {(*key, ArtifactRef.parse(artifact).fingerprint) for *key, artifact in artifacts}
    return [[*each.key, each.artifact] for each in run.entries() if (*each.key, each.ref.fingerprint) in works]


def _by_content(setting: str) -> bool:
    """Return whether a setting names a file that is known by what it holds, not by where it is."""
    return setting.startswith("prompts.") and setting.endswith((".train", ".heldout"))
