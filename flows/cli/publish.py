"""``flowmill publish``: uploads a finished export to the Hugging Face Hub."""

from __future__ import annotations

import os

from configs.errors import ConfigError, PublishError
from flows.console import console
from flows.environment import default_root
from tasks.export.publish import finished_export, publish
from tasks.runs.addresses import model_address
from tasks.runs.opening import open_run


def publish_command(
    model: str, repo: str, *, epoch: int | None, private: bool, token_env: str | None, root: str | None
) -> None:
    """Publish the export of RUN or RUN@EPOCH and print its address.

    Raises:
        PublishError: the variable holds no token, or the Hub refused the upload.
        ConfigError: the address is malformed, or names another epoch than the option.
    """
    run, named = model_address(model)
    if epoch is not None and named not in (None, epoch):
        raise ConfigError(f"'{model}' names epoch {named} and --epoch another, {epoch}. Leave one of them out.")
    token = None if token_env is None else os.environ.get(token_env)
    if token_env is not None and not token:
        raise PublishError(f"--token-env '{token_env}': there is no such environment variable, or it is empty.")
    files = finished_export(open_run(default_root(root), run, reads=True), named if epoch is None else epoch)
    console.print(publish(files, repo, private=private, token=token))
