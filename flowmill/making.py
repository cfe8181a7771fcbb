"""Runs started and stages run, from a person's own program."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from flowmill.reading import Run

if TYPE_CHECKING:
    from tasks.context import RunContext


def start(
    config: str | Path,
    *,
    root: str | None = None,
    name: str | None = None,
    overrides: Collection[str] = (),
) -> Run:
    """Return a run, made or found, to run stages of; nothing is computed yet.

    Args:
        config: a preset, such as 'digits', or a config file.
        root: folder or s3://bucket/prefix of the store; FLOWMILL_ROOT, else the config's, when absent.
        name: name of the run; the config's, else the file's, when absent.
        overrides: settings laid over the config, 'section.key=value' each.

    Raises:
        FlowmillError: something in the config cannot work, or a run of this name has other settings.
    """
    from configs.load import load_config
    from flows.environment import as_overrides, prepare_environment

    given = load_config(config, [*overrides, *as_overrides(root, name)])
    prepare_environment(given.execution.threads)
    from flows.runtime import begin
    from tasks.check import check_config
    from tasks.trust import remember

    check_config(given, rewards=False)
    remember(given)
    return Run(begin(given))


def run_stage(
    context: RunContext,
    name: str,
    epoch: int | str,
    *,
    slot: str = "",
    overrides: Collection[str] = (),
    force: bool = False,
    trust_store: bool = False,
) -> list[str]:
    """Run one stage of a run and return the artifacts; see ``Run.stage``."""
    from flows.calls import call
    from flows.requests import StageRequest
    from flows.stages import stage_flow

    asked = {"run": context.run.name, "root": context.store.root.uri, "epoch": epoch, "slot": slot, "force": force}
    request = StageRequest.model_validate({**asked, "overrides": [*overrides], "trust_store": trust_store})
    made = call(stage_flow(name), request, threads=context.config.execution.threads)
    return [each.artifact for each in made]


def train(context: RunContext, *, trust_store: bool = False) -> None:
    """Do what a run lacks; see ``Run.train``."""
    from flows.calls import call
    from flows.pipeline import bring_up_to_date
    from flows.requests import ContinueRequest

    request = ContinueRequest(run=context.run.name, root=context.store.root.uri, trust_store=trust_store)
    call(bring_up_to_date, request, threads=context.config.execution.threads)
