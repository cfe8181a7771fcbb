"""Starting, resuming and describing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowmill.configs.algorithm_defaults import IDENTITIES
from flowmill.configs.data import DataSection
from flowmill.configs.errors import RunConflictError, StoreError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.import_paths import import_from
from flowmill.configs.load import asks_for, differences, flatten, override_config, parse_config
from flowmill.configs.model import ModelSection
from flowmill.configs.override_quoting import text_override
from flowmill.configs.schema import RunConfig, StoreSection
from flowmill.configs.suggestions import did_you_mean
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RUN_VERSION, RunFolder, list_runs
from flowmill.storage.artifacts.mirrored_records import lost_newest
from flowmill.storage.backends import may_exist
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.shapes import with_columns
from flowmill.tasks.inputs.source_prompts import prompts_fingerprint, source_prompts
from flowmill.tasks.inputs.store_trust import READ, check_trusted, remember, trusted_modules
from flowmill.tasks.inputs.weight_sources import model_identity
from flowmill.tasks.runs.component_requirements import knowing_needs, note_needs
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.locks import FINISHED, holding, run_name
from flowmill.tasks.runs.moves import Moves, as_before, moved
from flowmill.tasks.runs.progress import Reporter
from flowmill.tasks.runs.start import started_from
from flowmill.tasks.specs.graph import HELD_OUT, RENDERER

_CUT = "rollout.groups_per_shard"
_ALGORITHM = "optimize.algorithm.name"
#: Settings of a store wherever it is.
_OF_STORE = set(StoreSection.model_fields) - {"root", "cache"}
#: Records that each start of a run writes, by the name below its folder.
_STARTED = frozenset({"run.json", "configs", "needs", "states", "tracking"})


def begin_run(config: RunConfig, *, reporter: Reporter | None = None) -> RunContext:
    """Create the run that a config describes, or bind to it if it exists with the same settings.

    The config becomes the run's config; with fewer epochs or another evaluation it selects other artifacts of the run.

    Raises:
        RunConflictError: the run has other settings, or another process executes it, whose run this would change.
    """
    config = with_columns_of_run(config)
    with holding(ArtifactStore(config.store), run_name(config)):
        return _begun(config, reporter)


def _begun(config: RunConfig, reporter: Reporter | None) -> RunContext:
    context = find_run(config, reporter=reporter)
    if context is None:
        store = ArtifactStore(config.store)
        run = RunFolder(store, run_name(config))
        if not run.create(_record(store, config)):
            # Another process created it in the meantime; bind to it only if it is the same.
            if run.describe() is None:
                raise StoreError(
                    f"'{layout.run_record(run.name)}' in '{store.root.uri}' exists but is no record. "
                    "Remove it, or give the run another name with --name."
                )
            return _begun(config, reporter)
        context = RunContext(store, config, run, reporter=reporter)
    else:
        context.run.restore(partial(_record, context.store, config))
    context.run.add("configs", recorded(config))
    note_needs(context.run, config)
    return context


def find_run(config: RunConfig, *, reporter: Reporter | None = None) -> RunContext | None:
    """Bind to the run that a config describes if it exists with the same settings; return None if it does not exist.
    The config names the columns of its rows of data."""
    store = ArtifactStore(config.store)
    run = RunFolder(store, run_name(config))
    changed = conflicts(run, config)
    if changed is None:
        return None
    refuse_other_settings(config, changed)
    return RunContext(store, config, run, reporter=reporter)


def has_begun(config: RunConfig) -> bool:
    """Return whether the run of a config exists with the same settings and has artifacts; creates no store."""
    if not may_exist(config.store):
        return False
    run = RunFolder(ArtifactStore(config.store), run_name(config))
    return conflicts(run, config) == [] and bool(run.entries())


def bind_run(config: RunConfig) -> RunContext:
    """Bind to the run that a config describes, or create it; the recorded config of an existing run stays."""
    return find_run(with_columns_of_run(config)) or begin_run(config)


def with_columns_of_run(config: RunConfig) -> RunConfig:
    """Return a config that names the columns of its rows of data: by the first row, or as its run has them if that
    cannot be read."""

    def section_of_run() -> DataSection | None:
        run = RunFolder(ArtifactStore(config.store), run_name(config))
        newest = run.config()
        return None if newest is None else parse_config(newest, where=f"run '{run.name}'").data

    return with_columns(config, section_of_run)


def refuse_other_settings(config: RunConfig, changed: Sequence[str]) -> None:
    """Refuse to continue a run with changed settings."""
    if changed:
        raise RunConflictError(
            f"Run '{run_name(config)}' exists in '{ArtifactStore(config.store).root.uri}' with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive this one another name with --name; common artifacts of both runs are not computed again."
        )


def conflicts(run: RunFolder, config: RunConfig) -> list[str] | None:
    """Return the changed settings that conflict with an existing run; None if the run does not exist."""
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
    """Bind to an existing run with the config of its last start, and overrides.

    Args:
        overrides: ``section.key=value`` strings for one stage.
        reporter: shows progress.
        epoch: epoch of that stage.
        reads: read-only; see ``RunContext``.
        trusted: use code, commands, addresses and paths that only the store's record of the run names.
    """
    # This machine, not the record, determines the locations of the store and its copies.
    written = require_run(ArtifactStore(root), name)
    record = written.config() or {}
    section = record.get("store", {})
    if isinstance(section, Mapping):
        section = {key: value for key, value in section.items() if key in _OF_STORE}
    stored = parse_config({**record, "store": section}, where=f"run '{name}'")
    if reads:
        stored = knowing_needs(stored, written, trusted=trusted)
    config = override_config(stored, [text_override("store.root", root), *overrides])
    if not trusted:
        check_trusted(stored, config, run=name, only=READ if reads else None)
    modules = config.execution.modules, config.execution.sources
    import_from(*(modules if trusted or not reads else trusted_modules(config)))
    store = ArtifactStore(config.store, remembers=reads)
    run = RunFolder(store, name)
    return RunContext(store, config, run, reporter=reporter, epoch=epoch, reads=reads)


def require_run(store: ArtifactStore, name: str) -> RunFolder:
    """Return a run; StoreError if it does not exist."""
    run = RunFolder(store, name)
    if run.config() is None:
        names = list_runs(store)
        hint = did_you_mean(name, names) if names else "The store holds no runs yet; start one with 'flowmill run'."
        raise StoreError(f"There is no run '{name}' in '{store.root.uri}'. {hint}")
    return run


def mark_finished(context: RunContext, result: Mapping[str, Any]) -> None:
    """Record that all artifacts of this config are committed, with their names and the result of the run."""
    entries = [entry for entry in context.chain.entries() if entry.ref.kind != "embeddings"]
    artifacts = [[*entry.key, entry.artifact] for entry in entries]
    attempts = _attempts(context.run, artifacts)
    context.run.add(
        _finished(context, context.config), {"artifacts": artifacts, "made": attempts, "result": dict(result)}
    )


def finished_result(context: RunContext) -> dict[str, Any] | None:
    """Return the result of the run if all artifacts of this config are committed, else None; no model is loaded.

    None for a hub id without a revision, which may now refer to another model, and for a run that lost a record that a
    start writes again.
    """
    run = context.run
    if any(model.path is not None and model.revision is None and not _is_local(model) for model in _models(context)):
        return None
    stored = run.config()
    if stored is None:
        return None
    # A config written by an earlier version may lack settings that now have a default.
    own = parse_config(stored, where=f"run '{run.name}'")
    moves = moved(context.store, run, own, context.config)
    requested = as_before(context.config, moves)
    # Before flowmill 0.3.0 the name of the series included every setting of the stored config.
    note = run.newest(_finished(context, requested, moves)) or run.newest(_series(context, stored, moves))
    if note is None:
        return None
    if _required(recorded(own)) != _required(recorded(requested)) or _attempts(run, note["artifacts"]) != note["made"]:
        return None
    if any(path.split("/")[2] in _STARTED for path in lost_newest(run.store.root, run.name)):
        return None
    refs = [ArtifactRef.parse(artifact) for *_, artifact in note["artifacts"]]
    return dict(note["result"]) if all(context.store.manifest(ref) is not None for ref in refs) else None


def note_moves(context: RunContext) -> None:
    """Record the current paths of a finished run's files, for commands that only read the run's record."""
    stored = context.run.config()
    if stored is not None:
        own = parse_config(stored, where=f"run '{context.run.name}'")
        if moved(context.store, context.run, own, context.config):
            remember(context.config)
            with holding(context.store, context.run.name):
                context.run.add("configs", recorded(context.config))


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return a config for the run's record: without the locations of the store, so that a store can be moved."""
    store = config.store.model_dump(mode="json", include=set(_OF_STORE), exclude_defaults=True)
    return config.model_dump(mode="json", exclude={"store"}) | ({"store": store} if store else {})


def _record(store: ArtifactStore, config: RunConfig) -> dict[str, Any]:
    identity = {"prompts": _prompts_identity(config), "preprocess": prompts_fingerprint(source_prompts(config))}
    start = {} if config.model.start is None else {"start": started_from(store, config)}
    return {"config": recorded(config), **identity, **start, "schema_version": RUN_VERSION}


def _prompts_identity(config: RunConfig) -> str:
    sources = source_prompts(config)
    return prompts_fingerprint({split: sources[split] for split in ("train", "heldout") if sources[split]})


def _finished(context: RunContext, config: RunConfig, moves: Moves = MappingProxyType({})) -> str:
    """Return the name of the series of records that mark a config as finished; ``config`` has the run's paths.

    Settings with their default value are not part of the name, so a setting that a new version adds does not change it.
    """
    return _series(context, config.model_dump(mode="json", exclude={"store"}, exclude_defaults=True), moves)


def _series(context: RunContext, settings: Mapping[str, Any], moves: Moves) -> str:
    # The size of shards is part of the name because it was before it became optional.
    required = _required(settings) | {key: value for key, value in flatten(settings).items() if key == _CUT}
    if _ALGORITHM in required:
        required[_ALGORITHM] = IDENTITIES.get(required[_ALGORITHM], required[_ALGORITHM])
    for name, slot, model in zip(("model.path", "render.model.path"), ("", RENDERER), _models(context), strict=False):
        if _is_local(model):
            required[name] = model_identity(str(model.path), None)
        if model.single_files:
            required[f"{name}, files"] = context.single_file_identity(model, slot)
    return f"{FINISHED}{fingerprint({**required, **_begun_as(context, moves)})[:16]}"


def _begun_as(context: RunContext, moves: Moves) -> dict[str, Any]:
    """Return the identity of files in addition to the base model, by setting: hashes of contents, not paths."""
    model, identities = context.config.model, dict[str, Any]()
    if model.lora is not None and model.lora.start is not None:
        identities["model.lora.start"] = context.adapter_identity
    if context.config.critic.path is not None:
        identities["critic.path"] = context.critic_identity
    data = context.config.data
    if data is not None:
        identities["data.train, contents"] = context.data_identity("")
        if data.heldout is not None:
            identities["data.heldout, contents"] = context.data_identity(HELD_OUT)
    before = {new: old for old, new in moves.values()}
    for setting, hashes in context.contents.by_setting.items():
        identities[f"{setting}, contents"] = {before.get(path, path): digest for path, digest in hashes.items()}
    return identities


def _models(context: RunContext) -> list[ModelSection]:
    render = context.config.render
    return [context.config.model, *([] if render is None else [render.model])]


def _is_local(model: ModelSection) -> bool:
    return model.path is not None and Path(model.path).is_dir()


def _required(config: Mapping[str, Any]) -> dict[str, Any]:
    # Lists of prompts are identified by their contents, not by their paths.
    settings = asks_for(config).items()
    lists = {key for key, _ in settings if key.startswith("prompts.") and key.endswith((".train", ".heldout"))}
    return {key: value for key, value in settings if key not in lists}


def _attempts(run: RunFolder, artifacts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return all attempts at the work of some artifacts; other artifacts of the run are ignored."""
    works = {(*key, ArtifactRef.parse(artifact).fingerprint) for *key, artifact in artifacts}
    return [[*each.key, each.artifact] for each in run.entries() if (*each.key, each.ref.fingerprint) in works]
