"""Runs stages and whole runs from a user's own program."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.runs.context import RunContext


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
    from flows.requests import StageRequest
    from flows.run_in_process import call
    from flows.stages import stage_flow

    asked = {"run": context.run.name, "root": context.store.root.uri, "epoch": epoch, "slot": slot, "force": force}
    request = StageRequest.model_validate({**asked, "overrides": [*overrides], "trust_store": trust_store})
    made = call(stage_flow(name), request, threads=context.config.execution.threads)
    return [each.artifact for each in made]


def train(context: RunContext, *, trust_store: bool = False) -> None:
    """Complete a run; see ``Run.train``."""
    from flows.pipeline import bring_up_to_date
    from flows.requests import ContinueRequest
    from flows.run_in_process import call

    request = ContinueRequest(run=context.run.name, root=context.store.root.uri, trust_store=trust_store)
    call(bring_up_to_date, request, threads=context.config.execution.threads)
