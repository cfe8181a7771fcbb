"""``flowmill store``: lists, verifies, repairs and copies artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowmill.configs.escaping import quoted, visible
from flowmill.flows.cli.options import AsJson, Epochs, Long, Root, Stages, TrustStore
from flowmill.flows.environment import existing_root

if TYPE_CHECKING:
    from flowmill.storage.artifacts.commit import ArtifactStore

store_app = typer.Typer(help="Inspect and maintain an artifact store.", no_args_is_help=True)


@store_app.command()
def ls(
    run: Annotated[list[str] | None, typer.Option("--run", help="Only artifacts of this run.", metavar="RUN")] = None,
    stage: Stages = None,
    epoch: Epochs = None,
    long: Long = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """List artifacts, the newest epochs first: epoch, stage, id, rows, size, state, and the runs that use them."""
    store = _open(root)
    from flowmill.flows.cli.artifacts import list_command
    from flowmill.flows.cli.filters import EntryFilter

    listed = EntryFilter(stages=stage or (), epochs=epoch or (), long=long)
    list_command(store, run or (), listed, as_json=as_json)


@store_app.command()
def show(
    artifact: Annotated[
        str, typer.Argument(help="Artifact: RUN/stage@epoch, or kind/id, which may be shortened.", metavar="ARTIFACT")
    ],
    sample: Annotated[
        str | None, typer.Option("--sample", help="Trace one sample of trajectories instead.", metavar="ID")
    ] = None,
    root: Root = None,
    trust_store: TrustStore = False,
    as_json: AsJson = False,
) -> None:
    """Show one artifact: options, inputs, shards, figures, and the schema of its tables.

    With --sample: prompt, seed, policy, rewards, advantage, and the optimizer updates one sample entered.
    """
    from flowmill.flows.console import console, print_json
    from flowmill.storage.maintenance.verify import describe_artifact, users_of
    from flowmill.tasks.runs.addresses import find_artifact

    store = _open(root)
    ref = find_artifact(store, artifact, trusted=trust_store)
    if sample is None:
        described = describe_artifact(store, str(ref))
    else:
        from flowmill.tasks.reports.trace import trace_sample
        from flowmill.tasks.runs.opening import open_run

        users = sorted(users_of(store).get(str(ref), ()))
        runs = [open_run(store.root.uri, each, reads=True, trusted=trust_store) for each in users]
        described = trace_sample(store, ref, sample, runs, trusted=trust_store)
    if as_json:
        print_json(described)
        return
    for key, value in described.items():
        console.print(key, style="bold")
        for line in _lines(value):
            console.print(f"  {line}")


@store_app.command()
def verify(
    root: Root = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also compare checksums of every byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the files and sizes of every committed artifact, with --deep also content. Exit with 1 on a problem."""
    from flowmill.flows.console import console, print_json
    from flowmill.storage.maintenance.verify import verify_store

    report = verify_store(_open(root), deep=deep)
    if as_json:
        print_json(report)
    else:
        for problem in report["problems"]:
            console.print(problem)
        console.print(f"{report['artifacts']} artifacts, {report['files']} files: {len(report['problems'])} problems")
        if report["problems"]:
            console.print(
                "'flowmill store repair' moves damaged files to quarantine/ and regenerates them with the stages of "
                "the runs that use them; records of runs are restored from their copies."
            )
    if report["problems"]:
        raise typer.Exit(1)


@store_app.command()
def repair(
    root: Root = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes only, not every byte.")] = False,
    only_quarantine: Annotated[bool, typer.Option("--no-regenerate", help="Only move damaged files.")] = False,
    trust_store: TrustStore = False,
) -> None:
    """Move damaged files to quarantine/; regenerate shards with their stages, and restore records from copies."""
    from flowmill.flows.cli.stage import check_makers, regenerate
    from flowmill.flows.console import console
    from flowmill.storage.artifacts.lineage import at_rest, damaged_records
    from flowmill.storage.maintenance.quarantine import quarantine
    from flowmill.storage.maintenance.verify import find_problems, users_of

    store = _open(root)
    with at_rest(store):
        problems = find_problems(store, deep=not quick)
        for problem in problems:
            console.print(problem.message)
        # Records of runs come first: the trust in a run is a question of its config.
        moved = [path for problem in problems if problem.ref is None for path in quarantine(store, problem)]
        users = users_of(store)
        damaged = {
            problem.ref: users.get(str(problem.ref), set())
            for problem in problems
            if problem.ref is not None and problem.lacks
        }
        if not only_quarantine:
            check_makers(store, damaged, trust_store=trust_store)
        moved += [path for problem in problems if problem.ref is not None for path in quarantine(store, problem)]
        left = damaged_records(store) if any(problem.ref is None for problem in problems) else []
    console.print(f"{len(problems)} problems; {len(moved)} files and folders set aside below quarantine/")
    if problems and not only_quarantine:
        regenerate(store, damaged, trust_store=trust_store)
    for loss in left:
        console.print(f"not repaired: {loss.message}")
    if left:
        raise typer.Exit(1)


@store_app.command()
def gc(
    root: Root = None,
    forget: Annotated[list[str] | None, typer.Option("--forget", help="Run to remove.", metavar="RUN")] = None,
    keep_epochs: Annotated[
        int | None, typer.Option("--keep-epochs", min=1, help="Remove files of epochs before each run's last N.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option("--stage", help="Stage for --keep-epochs; rollout when absent.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option("--run", help="Run for --keep-epochs; all when absent.", metavar="RUN")
    ] = None,
    older_than: Annotated[
        float, typer.Option("--older-than", help="Minimum age, in hours, of data that no run names.")
    ] = 24.0,
    delete: Annotated[bool, typer.Option("--delete", help="Remove; without it only list the removals.")] = False,
    trust_store: TrustStore = False,
) -> None:
    """Remove artifacts that no run names, forgotten runs, and files of past epochs, unless another run needs them.

    Records and manifests of past epochs stay, so digests and lineage remain complete. Unfinished files of killed
    processes go too, on other machines if they are unchanged for --older-than.
    """
    from flowmill.configs.human_units import size
    from flowmill.flows.console import console
    from flowmill.storage.artifacts.lineage import at_rest, list_runs
    from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
    from flowmill.tasks.runs.opening import require_run
    from flowmill.tasks.specs.stages import names_of

    store = _open(root)
    for name in [*(forget or ()), *(run or ())]:
        if name not in (forget or ()) or name not in list_runs(store):
            require_run(store, name)
    of_epochs = names_of("epoch", "evaluation", "export")
    for name in stage or ():
        if name not in of_epochs:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(of_epochs)}.", param_hint="--stage")
    # A running run may still read these files, for replay or ahead of training.
    with at_rest(store) if delete else contextlib.nullcontext():
        retention = Retention(
            forget=forget or (),
            keep_epochs=keep_epochs,
            stages=stage or ("rollout",),
            runs=run or (),
            needed=()
            if keep_epochs is None
            else _still_read(store, run or list_runs(store), forget or (), trusted=trust_store),
            due=partial(_due, store, forget or (), trusted=trust_store),
            older_than_s=older_than * 3600,
        )
        removals = plan_removals(store, retention)
        for removal in removals:
            console.print(f"{removal.label}  {size(removal.size)}  {removal.reason}")
            if delete:
                remove(store, removal)
    total = size(sum(removal.size for removal in removals))
    left = "; nothing removed yet, say --delete" if removals and not delete else ""
    console.print(f"{len(removals)} entries, {total}{left}")


def _still_read(store: ArtifactStore, names: Collection[str], forgotten: Collection[str], *, trusted: bool) -> set[str]:
    from flowmill.tasks.runs.opening import open_run
    from flowmill.tasks.runs.staleness import still_read

    def read(name: str) -> set[str]:
        return still_read(open_run(store.root.uri, name, reads=True, trusted=trusted).chain)

    return set[str]().union(*store.root.map(read, [name for name in names if name not in forgotten]))


def _due(store: ArtifactStore, forgotten: Collection[str], *, trusted: bool) -> set[str] | None:
    from flowmill.configs.errors import FlowmillError, TrustError
    from flowmill.flows.console import console
    from flowmill.storage.artifacts.lineage import list_runs
    from flowmill.tasks.runs.opening import open_run
    from flowmill.tasks.runs.staleness import unfinished

    untrusted = []

    def unfinished_of(name: str) -> set[str]:
        try:
            return unfinished(open_run(store.root.uri, name, reads=True, trusted=trusted).chain)
        except TrustError:
            untrusted.append(name)
            return set()
        except FlowmillError:
            # A run that cannot be opened does not continue.
            return set()

    due = set[str]().union(*store.root.map(unfinished_of, [name for name in list_runs(store) if name not in forgotten]))
    if untrusted:
        console.print(
            f"Incomplete artifacts that no run names stay: {', '.join(sorted(untrusted))} may continue with them, and "
            "names code that is not trusted here. --trust-store looks whether it does."
        )
    return None if untrusted else due


@store_app.command()
def export(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="FOLDER")],
    form: Annotated[str, typer.Option("--format", help="parquet, datasets or delta.")] = "parquet",
    epoch: Annotated[list[int] | None, typer.Option("--epoch", help="Epoch to export; all when absent.")] = None,
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Write a run as one table: samples with images, rewards and advantages joined, a file per epoch."""
    from flowmill.flows.console import console
    from flowmill.tasks.reports.dataset import export_run
    from flowmill.tasks.runs.opening import open_run

    context = open_run(existing_root(root), run, reads=True, trusted=trust_store)
    with _progress() as bar:
        task = bar.add_task("epochs")
        rows = export_run(
            context, folder, form, epochs=epoch or (), progress=lambda n, of: bar.update(task, completed=n, total=of)
        )
    console.print(f"{rows} rows in {quoted(folder)}")


@store_app.command()
def cp(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    target: Annotated[str, typer.Argument(help="Root to copy to.", metavar="URI")],
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Copy a run with everything it names to another root; existing files are not copied again."""
    from flowmill.configs.human_units import size
    from flowmill.flows.console import console
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.storage.maintenance.transfer import copy_run
    from flowmill.tasks.inputs.fits import named_fits
    from flowmill.tasks.runs.opening import open_run, require_run

    store = _open(root)
    require_run(store, run)
    fits = named_fits(open_run(existing_root(root), run, reads=True, trusted=trust_store).config)
    with _progress() as bar:
        task = bar.add_task("artifacts")
        counts = copy_run(
            store,
            ArtifactStore(target),
            run,
            fits=fits,
            progress=lambda artifact, n, of: bar.update(task, completed=n, total=of, description=artifact[:24]),
        )
    console.print(f"{counts['artifacts']} artifacts; {counts['shards']} shards, {size(counts['bytes'])} copied")


@store_app.command()
def digest(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    root: Root = None,
    trust_store: TrustStore = False,
    as_json: AsJson = False,
) -> None:
    """Print one hash over the content of all artifacts of a run, without times or hosts."""
    from flowmill.flows.console import console, print_json
    from flowmill.tasks.runs.opening import open_run

    value = open_run(existing_root(root), run, reads=True, trusted=trust_store).chain.digest()
    print_json({"run": run, "digest": value}) if as_json else console.print(value)


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flowmill.flows.console import console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _open(root: str | None) -> Any:
    uri = existing_root(root)
    from flowmill.storage.artifacts.commit import ArtifactStore

    return ArtifactStore(uri)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        lines = [f"{key}: {item}" for key, item in value.items()]
    else:
        lines = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    # Line breaks of a prompt could imitate output lines of this command.
    return [visible(line) for line in lines]
