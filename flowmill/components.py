"""Runs stages and whole runs from a user's own program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowmill.configs.command_options import refusal
from flowmill.configs.errors import ConfigError
from flowmill.configs.exits import uninterrupted

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


def run_stage(context: RunContext, name: str, fields: Mapping[str, Any]) -> list[str]:
    """Run one stage of a run and return the artifacts; see ``Run.stage``.

    Args:
        context: the run.
        name: the stage.
        fields: fields of ``flowmill.flows.requests.StageRequest``.
    """
    from pydantic import ValidationError

    with uninterrupted():
        from flowmill.flows.requests import StageRequest
        from flowmill.flows.run_in_process import call
        from flowmill.flows.stages import FLOWS
    from flowmill.tasks.specs.stages import stage_spec

    flow = FLOWS[stage_spec(name).name]
    try:
        request = StageRequest.model_validate({"run": context.run.name, "root": context.store.root.uri, **fields})
    except ValidationError as error:
        raise ConfigError(": ".join(refusal(error))) from None
    return [each.artifact for each in call(flow, request, threads=context.config.execution.threads)]


def train(context: RunContext, *, trust_store: bool = False) -> None:
    """Complete a run; see ``Run.train``."""
    with uninterrupted():
        from flowmill.flows.pipeline import bring_up_to_date
        from flowmill.flows.requests import ContinueRequest
        from flowmill.flows.run_in_process import call

    request = ContinueRequest(run=context.run.name, root=context.store.root.uri, trust_store=trust_store)
    call(bring_up_to_date, request, threads=context.config.execution.threads)
