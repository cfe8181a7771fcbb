"""``flowmill publish``: uploads a finished export to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from flowmill.configs.addresses import token_of
from flowmill.configs.errors import ConfigError, PublishError
from flowmill.configs.roots import default_root
from flowmill.flows.cli.best import chosen_epoch
from flowmill.flows.cli.options import Root, TrustStore
from flowmill.flows.console import console
from flowmill.flows.requests import PublishRequest


def publish_command(
    request: PublishRequest,
    *,
    root: Root = None,
    trust_store: TrustStore = False,
    dataset: Annotated[bool, typer.Option("--dataset", hidden=True)] = False,
) -> None:
    """Publish the export of RUN, RUN@EPOCH or RUN@best, and print the address."""
    if dataset:
        raise ConfigError(
            "--dataset no longer exists. Publish samples from Python: "
            "flowmill.open(ROOT).run(RUN).dataset(EPOCH).push_to_hub('OWNER/NAME')."
        )
    from flowmill.tasks.export.publish import finished_export, publish
    from flowmill.tasks.runs.addresses import model_address
    from flowmill.tasks.runs.opening import open_run

    run, named = model_address(request.model)
    if None not in (named, request.epoch) and named != request.epoch:
        raise ConfigError(
            f"'{request.model}' names epoch {named} and --epoch another, {request.epoch}. Leave one of them out."
        )
    token = None if request.token_env is None else token_of(request.token_env)
    if request.token_env is not None and not token:
        raise PublishError(f"--token-env '{request.token_env}': there is no such environment variable, or it is empty.")
    context = open_run(default_root(root), run, reads=True, trusted=trust_store)
    files = finished_export(context, chosen_epoch(context, request.epoch if named is None else named))
    address, removed = publish(files, request.repo, private=request.private, token=token)
    for name in removed:
        console.print(f"removed {name}, of an earlier export.", highlight=False, markup=False)
    console.print(address)
