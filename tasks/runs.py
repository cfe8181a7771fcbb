"""Starting, resuming and describing runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from configs.errors import ConfigError, RunConflictError, StoreError
from configs.fingerprint import fingerprint
from configs.load import differences, flatten, override_config, parse_config
from configs.schema import RunConfig
from configs.suggest import did_you_mean
from storage.commit import ArtifactStore
from storage.lineage import LineageEntry, RunFolder, list_runs
from tasks.progress import Reporter
from tasks.prompts import prompts_fingerprint, read_prompts
from tasks.workspace import Workspace


def begin_run(config: RunConfig, *, reporter: Reporter | None = None) -> Workspace:
    """Create the run a config describes, or bind to it when it exists with the same settings.

    Raises:
        RunConflictError: a run of this name exists with other settings.
        StoreError: the root cannot be used.
        PromptError: a prompt source cannot be used.
    """
    found = find_run(config, reporter=reporter)
    if found is not None:
        return found
    store = ArtifactStore(config.store)
    run = RunFolder(store, run_name(config))
    if not run.create(_record(config)):
        # Another process created it since; it is bound to only if it is the same.
        return begin_run(config, reporter=reporter)
    return Workspace(store, config, run, reporter=reporter)


def find_run(config: RunConfig, *, reporter: Reporter | None = None) -> Workspace | None:
    """Bind to the run a config describes if it exists with the same settings; None if it does not exist.

    Raises:
        RunConflictError: a run of this name exists with other settings.
        StoreError: the root cannot be used.
        PromptError: a prompt source cannot be used.
    """
    store = ArtifactStore(config.store)
    run = RunFolder(store, run_name(config))
    found = run.describe()
    if found is None:
        return None
    record = _record(config)
    changed = differences(found["config"], record["config"])
    if found["prompts"] != record["prompts"]:
        changed.append("prompts: the prompt files hold other prompts now")
    if changed:
        raise RunConflictError(
            f"Run '{run.name}' exists in '{store.root.uri}' with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive this one another name with --name; what the two have in common is not computed again."
        )
    return Workspace(store, config, run, reporter=reporter)


def open_run(root: str, name: str, *, overrides: Sequence[str] = (), reporter: Reporter | None = None) -> Workspace:
    """Bind to an existing run with its stored config and some overrides.

    Raises:
        StoreError: there is no such run, or the root cannot be used.
        ConfigError: an override is not valid.
    """
    found = require_run(ArtifactStore(root), name).describe() or {}
    config = override_config(parse_config(found["config"], where=f"run '{name}'"), [f"store.root={root}", *overrides])
    store = ArtifactStore(config.store)
    run = RunFolder(store, name)
    return Workspace(store, config, run, reporter=reporter)


def require_run(store: ArtifactStore, name: str) -> RunFolder:
    """Return a run that must exist.

    Raises:
        StoreError: it does not.
    """
    run = RunFolder(store, name)
    if run.describe() is None:
        names = list_runs(store)
        hint = did_you_mean(name, names) if names else "The store holds no runs yet; start one with 'flowmill run'."
        raise StoreError(f"There is no run '{name}' in '{store.root.uri}'. {hint}")
    return run


def run_name(config: RunConfig) -> str:
    """Return the run's name.

    Raises:
        ConfigError: it is missing or cannot be a folder name.
    """
    name = config.run.name or ""
    if not name or not all(char.isalnum() or char in "-_." for char in name) or name.startswith("."):
        raise ConfigError(f"run.name '{name}' must consist of letters, digits, '-', '_' and '.'. Set it with --name.")
    return name


@contextmanager
def executing(workspace: Workspace) -> Iterator[None]:
    """Hold the run's lock, after clearing what killed processes of this machine left half-written.

    Raises:
        RunConflictError: another process executes the run.
        ConfigError: something in the config cannot work.
    """
    from tasks.check import check_config

    check_config(workspace.config, rewards=False)
    root = workspace.store.root
    root.sweep()
    with root.lock(workspace.run.lock_path, f"Run '{workspace.run.name}'"):
        yield


def mark_finished(workspace: Workspace) -> None:
    """Write down that everything this config asks for is committed, and as which artifacts."""
    workspace.run.note(f"finished-{_work(workspace.config)}-{_made(workspace.run)}", {"finished": True})


def is_finished(workspace: Workspace) -> bool:
    """Return whether everything this config asks for is committed; reads small files only, loads no model.

    A base model in a local folder may have changed since, so such runs are never short-cut.
    """
    model = workspace.config.model
    if model.build is None and model.path is not None and model.revision is None:
        return False
    note = workspace.run.read_note(f"finished-{_work(workspace.config)}-{_made(workspace.run)}")
    refs = [entry.ref for entry in workspace.run.current() if entry.ref.kind != "embeddings"]
    return note is not None and all(workspace.store.manifest(ref) is not None for ref in refs)


def describe_run(run: RunFolder) -> dict[str, Any]:
    """Return what ``flowmill status RUN --json`` prints: config, epochs, figures, artifacts."""
    entries = run.current()
    record = run.describe() or {}
    last = max((entry.epoch for entry in entries if entry.stage == "optimize"), default=0)
    return {
        "run": run.name,
        "root": run.store.root.uri,
        "epochs": record["config"]["run"]["epochs"],
        "finished_epochs": last,
        "tracking": run.read_note("tracking"),
        "evaluations": _figures(run, entries, "evaluate"),
        "rewards": _rewards(run, entries),
        "advantages": _figures(run, entries, "advantage"),
        "artifacts": [
            {"epoch": e.epoch, "stage": e.stage, "slot": e.slot, "artifact": e.artifact, "forced": e.forced}
            for e in entries
        ],
        "config": record["config"],
    }


def _rewards(run: RunFolder, entries: Sequence[LineageEntry]) -> dict[str, dict[str, Any]]:
    rewards: dict[str, dict[str, Any]] = {}
    for entry in entries:
        manifest = run.store.manifest(entry.ref) if entry.stage == "score" else None
        if manifest is not None:
            rewards.setdefault(str(entry.epoch), {})[entry.slot] = dict(manifest.summary)
    return rewards


def _figures(run: RunFolder, entries: Sequence[LineageEntry], stage: str) -> dict[str, Any]:
    manifests = {entry.epoch: run.store.manifest(entry.ref) for entry in entries if entry.stage == stage}
    return {str(epoch): dict(manifest.summary) for epoch, manifest in manifests.items() if manifest is not None}


def _record(config: RunConfig) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "prompts": _prompts_identity(config), "schema_version": 1}


def _prompts_identity(config: RunConfig) -> str:
    section = config.prompts
    lists = {"train": read_prompts(section.train, section, where="prompts.train")}
    if section.heldout:
        lists["heldout"] = read_prompts(section.heldout, section, where="prompts.heldout")
    return prompts_fingerprint(lists)


def _work(config: RunConfig) -> str:
    """Return the identity of what a config asks for; where and how it is carried out does not count."""
    flat = flatten(config.model_dump(mode="json"))
    ignored = ("store.", "execution.", "tracking.", "prompts.train", "prompts.heldout")
    return fingerprint({key: value for key, value in flat.items() if not key.startswith(ignored)})[:16]


def _made(run: RunFolder) -> str:
    return fingerprint([[e.epoch, e.stage, e.slot, e.artifact] for e in run.current()])[:16]
