"""What a person asks of a flow: the parameters of deployments, which are forms in Prefect's UI, and of commands."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from configs import introspection
from configs.base import Section
from configs.escaping import command
from configs.presets import presets

#: Of Prefect: GPUs that all flow runs of a server share.
GPU_SLOTS = "flowmill-gpu"

Epoch = Annotated[int, Field(ge=0, title="number")] | Annotated[Literal["next", "latest"], Field(title="by progress")]


def _suggests(kind: str, names: tuple[str, ...], others: str) -> dict[str, Any]:
    """Return a schema of a text for which a form offers names of some kind, and takes others."""
    return {"anyOf": [{"type": "string", "title": kind, "enum": list(names)}, {"type": "string", "title": others}]}


def _own_first(schema: dict[str, Any]) -> None:
    """Put what requests have in common at the end of the form."""
    for name in Request.model_fields:
        schema["properties"][name] = schema["properties"].pop(name)


class Request(Section, ABC):
    """What every flow takes."""

    # Prefect's forms show the docstrings.
    model_config = ConfigDict(json_schema_extra=_own_first, use_attribute_docstrings=True)

    wait_minutes: float = Field(default=0, ge=0)
    """How long to wait while another process executes the run; 0 refuses at once."""
    gpu_slots: int = Field(default=0, ge=0)
    """Slots of Prefect's global concurrency limit 'flowmill-gpu' to hold while it works."""

    @abstractmethod
    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return what a person types to have the same done, or gone on with.

        Args:
            flow: the flow.
            deployment: the name of the deployment that started it; the flow's when absent.
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
    """Train so many epochs more than the run has, whatever the config says; absent: as many as it says."""
    rewind: bool = False
    """End a run that has more epochs than the config says where that says; else it keeps what it has."""

    def arguments(self) -> list[str]:
        """Return the arguments of flowmill that ask for the same."""
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
        """Return the same with its MLflow run below another, which has the report."""
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
    """Of the sweep; the names of its runs begin with it."""
    root: str | None = None
    """Folder or s3://bucket/prefix of the artifact store; the config's when absent."""
    grid: list[str] = Field(default_factory=list)
    """'section.key=value,value' each; every combination is a variant."""
    listed: list[str] = Field(default_factory=list)
    """Variants of their own: 'section.key=value section.key=value' each, combined with the grid."""
    overrides: list[str] = Field(default_factory=list)
    """Settings of all variants, 'section.key=value' each."""
    parallel: int = Field(default=1, ge=1)
    """Variants at a time; several run in processes of their own."""
    final: str | None = None
    """Prompts that chose nothing, a file as the worker sees it: the best variant is evaluated on them in the end."""

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill sweep ...'; the lines of a list are in a file, which only the person knows."""
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
    """Train so many epochs more than the run has; absent: what it lacks."""
    trust_store: bool = False
    """Carry out code and commands that only the store's record of the run names."""

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'prefect deployment run ...': the config file of the run is not known here."""
        asked = self.model_dump(exclude_defaults=True)
        name = f"{flow}/{deployment or flow}"
        return command("prefect", "deployment", "run", name, "-p", f"request={json.dumps(asked)}")


class StageRequest(Request):
    """One stage of one epoch of a run that exists."""

    run: str
    """Name of the run."""
    root: str = "flowmill-store"
    """Folder or s3://bucket/prefix of the artifact store."""
    epoch: Epoch = "latest"
    """An epoch; 'next': the first that lacks this stage; 'latest': the newest that was rolled out (evaluate, judge and
    export: trained)."""
    slot: str = Field(
        default="", json_schema_extra=_suggests("reward", ("", *introspection.table("models.rewards:REWARDS")), "label")
    )
    """Of score, gradient and judge: one reward; all of them when empty."""
    force: bool = False
    """Do the work again, as a new attempt."""
    evaluation: str = ""
    """Of evaluate and judge: the name of an evaluation beside the run's own."""
    overrides: list[str] = Field(default_factory=list)
    """Settings of this stage alone, 'section.key=value' each; the result stands beside the run."""
    trust_store: bool = False
    """Carry out code and commands that only the store's record of the run names."""

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
