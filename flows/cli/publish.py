"""``flowmill publish``: uploads a finished export to the Hugging Face Hub."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from configs.errors import ConfigError, PublishError
from flows.cli.options import Root
from flows.console import console
from flows.environment import default_root


def publish_command(
    model: Annotated[str, typer.Argument(help="Run, or RUN@EPOCH.", metavar="RUN[@EPOCH]")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hugging Face Hub.", metavar="OWNER/NAME")],
    *,
    epoch: Annotated[int | None, typer.Option("--epoch", help="Epoch of the export; the last when absent.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    token_env: Annotated[
        str | None, typer.Option("--token-env", help="Environment variable that holds the token.", metavar="NAME")
    ] = None,
    root: Root = None,
) -> None:
    """Publish the export of RUN or RUN@EPOCH and print its address.

    Raises:
        PublishError: the variable holds no token, or the Hub refused the upload.
        ConfigError: the address is malformed, or names another epoch than the option.
    """
    from tasks.export.publish import finished_export, publish
    from tasks.runs.addresses import model_address
    from tasks.runs.opening import open_run

    run, named = model_address(model)
    if epoch is not None and named not in (None, epoch):
        raise ConfigError(f"'{model}' names epoch {named} and --epoch another, {epoch}. Leave one of them out.")
    token = None if token_env is None else os.environ.get(token_env)
    if token_env is not None and not token:
        raise PublishError(f"--token-env '{token_env}': there is no such environment variable, or it is empty.")
    files = finished_export(open_run(default_root(root), run, reads=True), named if epoch is None else epoch)
    console.print(publish(files, repo, private=private, token=token))
