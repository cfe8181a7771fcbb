"""``flowmill publish``: a finished export to the Hugging Face Hub."""

from __future__ import annotations

import os

from configs.errors import PublishError
from flows.console import console
from flows.environment import default_root
from tasks.export.publish import finished_export, publish
from tasks.runs.opening import open_run


def publish_command(
    run: str, repo: str, *, epoch: int | None, private: bool, token_env: str | None, root: str | None
) -> None:
    """Publish the export of a run and print where it is.

    Raises:
        PublishError: the variable holds no token, or the Hub refused.
    """
    token = None if token_env is None else os.environ.get(token_env)
    if token_env is not None and not token:
        raise PublishError(f"--token-env '{token_env}': there is no such environment variable, or it is empty.")
    files = finished_export(open_run(default_root(root), run, reads=True), epoch)
    console.print(publish(files, repo, private=private, token=token), markup=False)
