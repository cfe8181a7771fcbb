"""``flowmill publish``: uploads a finished export, or samples with their scores, to the Hugging Face Hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from configs.errors import ConfigError, PublishError
from configs.human_units import size
from flows.cli.confirmation import confirm
from flows.cli.error_reporting import say
from flows.cli.options import Root
from flows.console import console, print_table
from flows.environment import default_root
from tasks.export.request import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.reports.published import DataFile
    from tasks.runs.context import RunContext

#: Files that the plan lists one by one.
_LISTED = 12


def publish_command(request: PublishRequest, *, root: Root = None) -> None:
    """Publish the export of RUN or RUN@EPOCH, or with --dataset its samples, and print the address.

    Raises:
        PublishError: the variable holds no token, or the Hub refused the upload.
        ConfigError: the address is malformed, names another epoch than the option, or no terminal can ask.
        CancelledError: the user declined.
    """
    from tasks.export.publish import finished_export, publish
    from tasks.runs.addresses import model_address
    from tasks.runs.opening import open_run

    run, named = model_address(request.model)
    others = [epoch for epoch in request.epoch if epoch != named]
    if named is not None and others:
        raise ConfigError(
            f"'{request.model}' names epoch {named} and --epoch another, {others[0]}. Leave one of them out."
        )
    epochs = request.epoch if named is None else [named]
    if not request.dataset and (len(epochs) > 1 or request.part or request.form != "parquet"):
        raise ConfigError("Several epochs, --part and --format belong to samples. Give --dataset, or leave them out.")
    token = None if request.token_env is None else os.environ.get(request.token_env)
    if request.token_env is not None and not token:
        raise PublishError(f"--token-env '{request.token_env}': there is no such environment variable, or it is empty.")
    context = open_run(default_root(root), run, reads=True)
    if request.dataset:
        publish_samples(context, request, epochs, token)
        return
    files = finished_export(context, epochs[0] if epochs else None)
    console.print(publish(files, request.repo, private=request.private, token=token))


def publish_samples(context: RunContext, request: PublishRequest, epochs: Sequence[int], token: str | None) -> None:
    """Show the plan, ask, upload the files, and print the address; see ``publish_command``."""
    from tasks.export.publish import Repository
    from tasks.reports.dataset_card import dataset_card
    from tasks.reports.published import is_published, parts_of, write_files

    repository = Repository(request.repo, "dataset", token)
    parts = parts_of(context, epochs, request.part)
    known = repository.found()
    say(f"writing the samples of {context.run.name}")
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(context, Path(folder), parts, request.form)
        card = dataset_card(context, request.repo, files, parts).encode()
        uploaded: dict[str, Path | bytes] = {"README.md": card, **{file.name: file.path for file in files}}
        # Files of an earlier upload would still be loaded.
        removed = [] if known is None else [name for name in known[1] if is_published(name) and name not in uploaded]
        _show(request, files, card, private=request.private if known is None else known[0], exists=known is not None)
        for name in removed:
            console.print(f"removed there: {name}")
        if not request.yes:
            confirm(
                "Upload this?",
                unasked="Nothing was uploaded. Give --yes to upload this.",
                declined="Nothing was uploaded.",
            )
        message = f"Publish samples of {context.run.name}"
        console.print(repository.commit(uploaded, private=request.private, message=message, removed=removed))


def _show(request: PublishRequest, files: Sequence[DataFile], card: bytes, *, private: bool, exists: bool) -> None:
    """Print the plan: files with rows and sizes, the repository, and who can read it."""
    table = Table("file", "rows", "size", title=f"To upload to {request.repo}", title_justify="left")
    table.add_row("README.md", "", size(len(card)))
    sizes = {file.name: file.path.stat().st_size for file in files}
    groups = {file.part: [each for each in files if each.part == file.part] for file in files}
    for part, group in groups.items():
        for file in group if len(files) <= _LISTED else ():
            table.add_row(file.name, str(file.rows), size(sizes[file.name]))
        if len(files) > _LISTED:
            rows, whole = sum(file.rows for file in group), sum(sizes[file.name] for file in group)
            table.add_row(f"{part}/: {len(group)} files", str(rows), size(whole))
    print_table(table)
    rest = "private" if private else "public: everybody can read it"
    console.print(f"{size(sum(sizes.values()) + len(card))} in all; {'existing' if exists else 'new'} dataset, {rest}")
    licenses = sorted({name for file in files for name in file.licenses if name})
    console.print(f"licenses that rows state: {', '.join(licenses) or 'none'}")
