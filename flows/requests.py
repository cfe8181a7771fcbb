"""Requests of flows: parameters of deployments, which Prefect's UI shows as forms, and options of commands.

A field is stated here once: ``flowmill.flows.cli.options`` makes its option, Prefect its input, and ``arguments`` the
equivalent command.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from flowmill.configs import introspection
from flowmill.configs.base import Section
from flowmill.configs.command_options import CommandLine, command_line
from flowmill.configs.escaping import command
from flowmill.configs.overrides import with_resolved_paths
from flowmill.configs.presets import presets

#: Prefect's concurrency limit for the GPUs that all flow runs of a server share.
GPU_SLOTS = "flowmill-gpu"


def _epoch(value: Any) -> Any:
    """Return the number that a text holds; refuse texts that are no epoch."""
    if not isinstance(value, str) or value in ("next", "latest"):
        return value
    if not value.isdecimal():
        raise ValueError(f"'{value}' is no epoch. Give a number from 0 on, or next, or latest.")
    return int(value)


Epoch = Annotated[
    Annotated[int, Field(ge=0, title="number")] | Annotated[Literal["next", "latest"], Field(title="by progress")],
    BeforeValidator(_epoch),
]


def _suggests(kind: str, names: tuple[str, ...], others: str) -> dict[str, Any]:
    """Return a JSON schema of a string for which a form offers names and accepts others."""
    return {"anyOf": [{"type": "string", "title": kind, "enum": list(names)}, {"type": "string", "title": others}]}


Config = Annotated[
    str,
    CommandLine("CONFIG", "CONFIG"),
    Field(
        description="A preset, or the path of a config file, in a deployment as its worker sees it.",
        json_schema_extra=_suggests("preset", presets(), "config file"),
    ),
]
Overrides = Annotated[list[str], CommandLine("--set", "KEY=VALUE")]
Advance = Annotated[int | None, Field(ge=1), CommandLine(metavar="N")]
Show = Annotated[
    int,
    Field(ge=0, description="Samples of each evaluation to print: scores, and texts or the file of the images."),
    CommandLine(metavar="N"),
]
ConfigRoot = Annotated[
    str | None,
    CommandLine(metavar="URI"),
    Field(description="Folder or s3://bucket/prefix of the artifact store; the config's when absent."),
]
#: A command takes the store that FLOWMILL_ROOT names.
RunRoot = Annotated[
    str,
    CommandLine(metavar="URI", default=None),
    Field(description="Folder or s3://bucket/prefix of the artifact store."),
]
TrustStore = Annotated[bool, Field(description="Run code and commands that only the store's record of the run names.")]


def _own_first(schema: dict[str, Any]) -> None:
    """Move the fields common to all requests to the end of the form."""
    for name in Request.model_fields:
        schema["properties"][name] = schema["properties"].pop(name)


class Request(Section, ABC):
    """Fields that every flow takes."""

    # Prefect's forms show the docstrings.
    model_config = ConfigDict(json_schema_extra=_own_first, use_attribute_docstrings=True)

    wait_minutes: Annotated[float, CommandLine("")] = Field(default=0, ge=0)
    """How long to wait while another process executes the run; 0 refuses at once."""
    gpu_slots: Annotated[int, CommandLine("")] = Field(default=0, ge=0)
    """Slots of Prefect's global concurrency limit 'flowmill-gpu' to hold while the flow runs."""

    @abstractmethod
    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return the shell command that does or continues the same work.

        Args:
            flow: the flow.
            deployment: the name of the deployment that started it; the flow's name when absent.
        """

    def arguments(self) -> list[str]:
        """Return the equivalent arguments of a command: every value that is not its default."""
        arguments: list[str] = []
        for name, field in type(self).model_fields.items():
            line, value = command_line(name, field), getattr(self, name)
            if not line.name or value is None or value is False or value == line.default:
                continue
            option = [line.name] if line.name.startswith("-") else []
            for each in value if isinstance(value, list) else [value]:
                arguments += [*option, *([] if each is True else [str(each)])]
        return arguments


class PipelineRequest(Request):
    """A training run from its config file: started, or continued where it stopped."""

    config: Config
    root: ConfigRoot = None
    name: Annotated[str | None, CommandLine(metavar="RUN")] = None
    """Name of the run; the config's, else the file's name, when absent."""
    overrides: Overrides = Field(default_factory=list)
    """Settings laid over the config, 'section.key=value' each."""
    advance: Advance = None
    """Train this many epochs more than the run has, instead of the config's number; a stopped request goes on."""
    rewind: bool = False
    """Shorten a run that has more epochs than the config; otherwise it keeps them."""
    show: Show = 0

    def below(self, parent: str) -> PipelineRequest:
        """Return the request with its MLflow run nested below another, which holds the report."""
        shown = [f"tracking.parent={parent}", "tracking.report=false"]
        return self.model_copy(update={"overrides": [*self.overrides, *shown]})

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill run ...'."""
        return command("flowmill", "run", *self.arguments())


class SweepRequest(Request):
    """Variants of one config."""

    config: Config
    name: str = Field(default_factory=lambda data: f"{Path(data['config']).stem}-sweep")
    """Name of the sweep, with which the names of its runs begin; the config's when absent."""
    root: ConfigRoot = None
    grid: Annotated[list[str], CommandLine(metavar="KEY=VALUE,VALUE")] = Field(default_factory=list)
    """'section.key=value,value' each; every combination is a variant."""
    listed: Annotated[list[str], CommandLine("")] = Field(default_factory=list)
    """Explicit variants: 'section.key=value section.key=value' each, combined with the grid."""
    overrides: Overrides = Field(default_factory=list)
    """Settings of all variants, 'section.key=value' each."""
    parallel: Annotated[int, CommandLine(metavar="N")] = Field(default=1, ge=1)
    """Variants at a time; with more than one, each runs in a separate process."""
    final: Annotated[str | None, CommandLine(metavar="PROMPTS")] = None
    """File of test prompts that are not used for selection: the best variant is evaluated on them."""

    @model_validator(mode="after")
    def _waits_in_one_process(self) -> SweepRequest:
        if self.parallel > 1 and (self.wait_minutes or self.gpu_slots):
            raise ValueError(
                f"wait_minutes {self.wait_minutes:g} and gpu_slots {self.gpu_slots} hold for the flow runs of one "
                f"process, but parallel {self.parallel} starts others. Set parallel to 1, or leave both at 0"
            )
        return self

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill sweep ...', without the list of variants, whose file is unknown here."""
        return command("flowmill", "sweep", *self.arguments())


class ContinueRequest(Request):
    """A run that exists, brought up to date under the config it was last started with."""

    run: str
    """Name of the run."""
    root: RunRoot = "flowmill-store"
    advance: Advance = None
    """Train this many epochs more than the run has; complete the run when absent."""
    show: Show = 0
    trust_store: TrustStore = False

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'prefect deployment run ...': the config file of the run is unknown here."""
        request = self.model_dump(exclude_defaults=True)
        name = f"{flow}/{deployment or flow}"
        return command("prefect", "deployment", "run", name, "-p", f"request={json.dumps(request)}")


class StageRequest(Request):
    """One stage of one epoch of a run that exists."""

    run: Annotated[str, CommandLine(metavar="RUN")]
    """Name of the run."""
    root: RunRoot = "flowmill-store"
    epoch: Annotated[Epoch, CommandLine(metavar="N", default=0)] = "latest"
    """An epoch, 0 is before training; 'next': the first without this stage; 'latest': the newest with rollouts
    (evaluate, judge and export: the newest trained)."""
    slot: Annotated[str, CommandLine(metavar="REWARD")] = Field(
        default="",
        json_schema_extra=_suggests("reward", ("", *introspection.table("flowmill.models.rewards:REWARDS")), "label"),
    )
    """For score, gradient and judge: one reward; all rewards when empty."""
    force: bool = False
    """Do the work again, as a new attempt."""
    evaluation: Annotated[str, CommandLine("--name", "NAME")] = ""
    """For evaluate and judge: the name of an additional evaluation, separate from the run's own."""
    overrides: Annotated[Overrides, AfterValidator(with_resolved_paths)] = Field(default_factory=list)
    """Settings of this stage alone, 'section.key=value' each; the result is a side result, kept next to the run."""
    trust_store: TrustStore = False

    def command(self, flow: str, deployment: str | None = None) -> str:
        """Return 'flowmill stage ...'."""
        return command("flowmill", "stage", flow, *self.arguments())


class DeployRequest(Section):
    """Deployments to create or change: the options of ``flowmill deploy``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    only: Annotated[list[str], CommandLine(metavar="FLOW")] = Field(default_factory=list)
    """This flow: pipeline, continue or a stage."""
    name: Annotated[str | None, CommandLine(metavar="NAME")] = None
    """Name of the deployment, the flow's when absent; deployments of other names stay unchanged."""
    parameters: Annotated[dict[str, Any], CommandLine("")] = Field(default_factory=dict)
    """Fields of the flows' requests; each flow takes the fields it has."""
    defaults: Annotated[dict[str, Any], CommandLine("")] = Field(default_factory=dict)
    """Fields for new deployments only; existing ones keep theirs."""
    schedule: str | None = None
    """'0 2 * * *', 'every 30 s' (s, min, h, d), or an RRULE; existing deployments keep theirs."""
    timezone: str | None = None
    """Time zone of the schedule, as Europe/Vienna; when absent UTC."""
    pool: Annotated[str | None, CommandLine(metavar="NAME")] = None
    """Work pool, created if it is missing; when absent each deployment's own, 'flowmill' for new ones."""
    kind: Annotated[Literal["process", "docker", "kubernetes"] | None, CommandLine("--type")] = None
    """Type of the pool, if it is created; when absent process."""
    image: str | None = None
    """Container image."""
    gpu_slots: Annotated[int | None, CommandLine(metavar="N")] = Field(default=None, ge=1)
    """GPUs that all flow runs share."""

    @property
    def folder(self) -> str | None:
        """The working directory of the flows: this one; None in containers."""
        return str(Path.cwd()) if self.kind in (None, "process") else None


class PublishRequest(Section):
    """The export to upload and its repository: the options of ``flowmill publish``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: Annotated[str, CommandLine("RUN", "RUN[@EPOCH]")]
    """Run, RUN@EPOCH, or RUN@best: best by held-out score."""
    repo: Annotated[str, CommandLine("REPO", "OWNER/NAME")]
    """Repository on the Hugging Face Hub."""
    epoch: Annotated[int | None, CommandLine(metavar="N")] = None
    """Epoch of the export; the last when absent."""
    private: bool = False
    """Make a new repository private."""
    token_env: Annotated[str | None, CommandLine(metavar="NAME")] = None
    """Environment variable that holds the token."""
