"""Requests of flows: parameters of deployments, which Prefect's UI shows as forms, and of commands."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from configs import introspection
from configs.base import Section
from configs.escaping import command
from configs.presets import presets

#: Prefect's concurrency limit for the GPUs that all flow runs of a server share.
GPU_SLOTS = "flowmill-gpu"

Epoch = Annotated[int, Field(ge=0, title="number")] | Annotated[Literal["next", "latest"], Field(title="by progress")]


def _suggests(kind: str, names: tuple[str, ...], others: str) -> dict[str, Any]:
    """Return a JSON schema of a string for which a form offers names and accepts others."""
    return {"anyOf": [{"type": "string", "title": kind, "enum": list(names)}, {"type": "string", "title": others}]}


def _own_first(schema: dict[str, Any]) -> None:
    """Move the fields common to all requests to the end of the form."""
    for name in Request.model_fields:
        schema["properties"][name] = schema["properties"].pop(name)


class Request(Section, ABC):
    """Fields that every flow takes."""

    # Prefect's forms show the docstrings.
    model_config = ConfigDict(json_schema_extra=_own_first, use_attribute_docstrings=True)

    wait_minutes: float = Field(default=0, ge=0)
    """How long to wait while another process executes the run; 0 refuses at once."""
    gpu_slots: int = Field(default=0, ge=0)
    """Slots of Prefect's global concurrency limit 'flowmill-gpu' to hold while the flow runs."""

    @abstractmethod
    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return the shell command that does or continues the same work.

        Args:
            flow: the flow.
            deployment: the name of the deployment that started it; the flow's name when absent.
        """


class PipelineRequest(Request):
    """A training run from its config file: started, or continued where it stopped."""

    config: str = Field(json_schema_extra=_suggests("preset", presets(), "config file"))
    """A preset, or the path of a config file as the worker sees it."""
    root: str | None = None
    """Folder or s3://bucket/prefix of the artifact store; the config's when absent."""
    name: str | None = None
    """Name of the run; the config's, else the file's name, when absent."""
    overrides: list[str] = Field(default_factory=list)
    """Settings laid over the config, 'section.key=value' each."""
    advance: int | None = Field(default=None, ge=1)
    """Train this many epochs more than the run has, instead of the config's number."""
    rewind: bool = False
    """Shorten a run that has more epochs than the config; otherwise it keeps them."""

    def arguments(self) -> list[str]:
        """Return the equivalent arguments of the ``flowmill`` command."""
        return [
            "run",
            self.config,
            *_option("--root", self.root),
            *_option("--name", self.name),
            *_option("--advance", self.advance),
            *(["--rewind"] if self.rewind else []),
            *_sets(self.overrides),
        ]

    def below(self, parent: str) -> PipelineRequest:
        """Return the request with its MLflow run nested below another, which holds the report."""
        shown = [f"tracking.parent={parent}", "tracking.report=false"]
        return self.model_copy(update={"overrides": [*self.overrides, *shown]})

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill run ...'."""
        return command("flowmill", *self.arguments())


class SweepRequest(Request):
    """Variants of one config."""

    config: str = Field(json_schema_extra=_suggests("preset", presets(), "config file"))
    """A preset, or the path of a config file as the worker sees it."""
    name: str
    """Name of the sweep; the names of its runs begin with it."""
    root: str | None = None
    """Folder or s3://bucket/prefix of the artifact store; the config's when absent."""
    grid: list[str] = Field(default_factory=list)
    """'section.key=value,value' each; every combination is a variant."""
    listed: list[str] = Field(default_factory=list)
    """Explicit variants: 'section.key=value section.key=value' each, combined with the grid."""
    overrides: list[str] = Field(default_factory=list)
    """Settings of all variants, 'section.key=value' each."""
    parallel: int = Field(default=1, ge=1)
    """Variants at a time; with more than one, each runs in a separate process."""
    final: str | None = None
    """Test prompts not used for selection, a file as the worker sees it: the best variant is evaluated on them."""

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill sweep ...', without the list of variants, whose file is not known here."""
        given = [self.config, "--name", self.name, *_option("--root", self.root), "--parallel", str(self.parallel)]
        given += [part for each in self.grid for part in ("--grid", each)]
        given += _option("--final", self.final)
        return command("flowmill", "sweep", *given, *_sets(self.overrides))


class ContinueRequest(Request):
    """A run that exists, brought up to date under the config it was last started with."""

    run: str
    """Name of the run."""
    root: str = "flowmill-store"
    """Folder or s3://bucket/prefix of the artifact store."""
    advance: int | None = Field(default=None, ge=1)
    """Train this many epochs more than the run has; complete the run when absent."""
    trust_store: bool = False
    """Run code and commands that only the store's record of the run names."""

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'prefect deployment run ...': the config file of the run is not known here."""
        request = self.model_dump(exclude_defaults=True)
        name = f"{flow}/{deployment or flow}"
        return command("prefect", "deployment", "run", name, "-p", f"request={json.dumps(request)}")


class StageRequest(Request):
    """One stage of one epoch of a run that exists."""

    run: str
    """Name of the run."""
    root: str = "flowmill-store"
    """Folder or s3://bucket/prefix of the artifact store."""
    epoch: Epoch = "latest"
    """An epoch; 'next': the first without this stage; 'latest': the newest with rollouts (evaluate, judge and export:
    the newest trained)."""
    slot: str = Field(
        default="", json_schema_extra=_suggests("reward", ("", *introspection.table("models.rewards:REWARDS")), "label")
    )
    """For score, gradient and judge: one reward; all rewards when empty."""
    force: bool = False
    """Do the work again, as a new attempt."""
    evaluation: str = ""
    """For evaluate and judge: the name of an additional evaluation, separate from the run's own."""
    overrides: list[str] = Field(default_factory=list)
    """Settings of this stage alone, 'section.key=value' each; the result is a side result of the run."""
    trust_store: bool = False
    """Run code and commands that only the store's record of the run names."""

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill stage ...'."""
        given = [*_option("--run", self.run), *_option("--epoch", self.epoch), *_option("--root", self.root)]
        given += [*_option("--name", self.evaluation or None), *(["--force"] if self.force else [])]
        given += ["--trust-store"] if self.trust_store else []
        return command("flowmill", "stage", flow, *given, *_sets(self.overrides))


def _option(name: str, value: str | int | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _sets(overrides: list[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]
