"""Options of the command line are text, none of it read as YAML; those of a request are its fields."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.main import get_command
from typer.testing import CliRunner

import flowmill
from flowmill.components import run_stage
from flowmill.configs.command_options import command_line
from flowmill.configs.errors import ConfigError
from flowmill.configs.override_quoting import text_override
from flowmill.configs.overrides import apply_overrides
from flowmill.flows.cli import app
from flowmill.flows.cli.request_options import with_options
from flowmill.flows.environment import as_overrides
from flowmill.flows.requests import DeployRequest, PipelineRequest, Request, StageRequest, SweepRequest
from flowmill.tasks.execution.serve_reward import ServeRequest
from flowmill.tasks.ratings.request import RateRequest
from flowmill.tasks.runs.opening import run_name
from tests.conftest import ConfigFactory

TEXTS = [
    "x #y",
    "007",
    "yes",
    "2026",
    "[z]",
    "@at",
    "a\nb",
    "a\tb",
    " a ",
    "a: b",
    "'",
    '"',
    "\\n",
    "é😀",
    "\x85\u2028\x7f",
]


@pytest.mark.parametrize("text", [*TEXTS, b"\xff".decode(errors="surrogateescape")])
def test_a_text_is_taken_as_it_is(text: str) -> None:
    assert apply_overrides({}, [text_override("store.root", text)]) == {"store": {"root": text}}
    assert apply_overrides({}, as_overrides(text, text)) == {"store": {"root": text}, "run": {"name": text}}


def test_a_name_has_a_length(make_config: ConfigFactory) -> None:
    assert run_name(make_config(f"run.name={'n' * 128}")) == "n" * 128
    with pytest.raises(ConfigError, match=r"has 129 bytes.*at most 128"):
        run_name(make_config(f"run.name={'n' * 129}"))


# Options that are the fields of a request.


KINDS: dict[str, type[BaseModel]] = {
    "run": PipelineRequest,
    "sweep": SweepRequest,
    "stage": StageRequest,
    "deploy": DeployRequest,
    "serve-reward": ServeRequest,
    "rate": RateRequest,
}


@pytest.mark.parametrize("command", KINDS)
def test_every_field_of_a_request_is_an_option_with_its_default_and_help(command: str) -> None:
    loaded = get_command(app).commands[command].loaded  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in loaded.params}
    kind = KINDS[command]
    for name, field in kind.model_fields.items():
        line = command_line(name, field)
        if not line.name:
            continue
        option = options[name]
        assert (line.name in option.opts) is line.name.startswith("-"), name
        assert option.required is field.is_required(), name
        assert option.default == (None if field.is_required() else line.default), name
        assert option.help == " ".join(str(field.description).split()), name
        assert option.help, "every option says what it is for"


REQUESTS = [
    ("run", PipelineRequest(config="a b.yaml", root="s3://b/p", overrides=["a.b=1", "c.d=x y"], rewind=True)),
    ("run", PipelineRequest(config="digits", name="n", advance=3)),
    ("sweep", SweepRequest(config="c/digits.yaml", grid=["a.b=1,2", "c.d=3,4"], parallel=2, final="f.txt")),
    ("stage", StageRequest(run="r", epoch="next", slot="ocr", force=True, evaluation="e", trust_store=True)),
    ("stage", StageRequest(run="r", root="elsewhere", epoch=0, overrides=["a.b=1"])),
]


def test_processes_of_a_sweep_wait_for_nothing() -> None:
    for waits in ({"wait_minutes": 1}, {"gpu_slots": 2}):
        assert SweepRequest(config="digits", parallel=1, **waits)
        with pytest.raises(ValueError, match="hold for the flow runs of one process"):
            SweepRequest(config="digits", parallel=2, **waits)


@pytest.mark.parametrize(("command", "request_"), REQUESTS)
def test_the_arguments_of_a_request_are_read_as_the_request(command: str, request_: Request) -> None:
    kind, found = type(request_), []

    def take(request: Any) -> None:
        found.append(request)

    take.__annotations__["request"] = kind
    single = typer.Typer()
    single.command()(with_options(take))
    done = CliRunner().invoke(single, request_.arguments())
    assert done.exit_code == 0, done.output
    assert found == [request_]
    assert request_.command("stage" if command == "stage" else "x").startswith(f"flowmill {command}")


def test_a_value_that_a_request_refuses_is_an_error_of_its_option() -> None:
    def take(request: Any) -> None:
        raise AssertionError(request)

    take.__annotations__["request"] = StageRequest
    single = typer.Typer()
    single.command()(with_options(take))
    for arguments, said in (
        (["--epoch", "last"], ("Invalid value for '--epoch'", "'last' is no epoch")),
        (["--set", "model.path=http://user:word@host/x"], ("Invalid value for '--set'", "holds a password")),
    ):
        done = CliRunner().invoke(single, ["--run", "r", *arguments])
        assert done.exit_code == 2
        assert all(each in done.output for each in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--evaluation"], "'--evaluation': It is the evaluation of one epoch"),
        (["--evaluation", "--against", "s", "--epoch", "1"], "'--evaluation': --against compares evaluations"),
        (["--group", "3"], "'--group': --task compare shows two samples"),
    ],
)
def test_an_option_of_a_rating_without_effect_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["rate", "r", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert RateRequest(run="r", epoch=0, evaluation=True, task="rank", group=3)


def test_what_check_cannot_take_is_one_message() -> None:
    done = CliRunner().invoke(app, ["check", "digits", "--set", "tracking.uri=http://user:word@host/x"])
    assert isinstance(done.exception, ConfigError)
    assert "holds a password" in str(done.exception)
    assert "word@" not in str(done.exception)
    for memory in ("nan", "inf", "-1"):
        done = CliRunner().invoke(app, ["check", "digits", "--gpu-memory", memory])
        assert done.exit_code == 2
        assert "Invalid value for '--gpu-memory'" in done.output


@pytest.mark.parametrize(("function", "kind"), [(flowmill.start, PipelineRequest), (flowmill.Run.stage, StageRequest)])
def test_parameters_in_python_are_fields_with_their_defaults(function: Callable[..., Any], kind: type[Request]) -> None:
    for name, parameter in signature(function).parameters.items():
        if name not in ("self", "name") or name in kind.model_fields:
            field = kind.model_fields[name]
            assert (parameter.default is Parameter.empty) is field.is_required(), name
            default = field.get_default(call_default_factory=True)
            assert field.is_required() or parameter.default == (tuple(default) if name == "overrides" else default), (
                name
            )


def test_a_value_from_python_that_a_request_refuses_is_one_message() -> None:
    context = SimpleNamespace(run=SimpleNamespace(name="r"), store=SimpleNamespace(root=SimpleNamespace(uri="s")))
    with pytest.raises(ConfigError, match="epoch: 'last' is no epoch"):
        run_stage(context, "score", {"epoch": "last"})  # type: ignore[arg-type]
