"""Options of the command line are text, none of it read as YAML; those of a request are its fields."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from configs.errors import ConfigError
from configs.override_quoting import text_override
from configs.overrides import apply_overrides
from flows.cli import app
from flows.cli.options import with_options
from flows.environment import as_overrides
from flows.requests import PipelineRequest, Request, StageRequest, SweepRequest, command_line
from tasks.runs.opening import run_name
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


@pytest.mark.parametrize("command", ["run", "sweep", "stage"])
def test_every_field_of_a_request_is_an_option_with_its_default_and_help(command: str) -> None:
    loaded = get_command(app).commands[command].loaded  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in loaded.params}
    kind = {"run": PipelineRequest, "sweep": SweepRequest, "stage": StageRequest}[command]
    for name, field in kind.model_fields.items():
        line = command_line(name, field)
        if line.hidden:
            continue
        option = options[name]
        assert (line.name in option.opts) is line.is_option, name
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
    with pytest.raises(ConfigError, match=r"^--set: holds a password"):
        with_options(take)(
            **dict.fromkeys(["root", "epoch", "slot", "force", "evaluation", "trust_store"]),
            run="r",
            overrides=["model.path=http://user:word@host/x"],
        )
    single = typer.Typer()
    single.command()(with_options(take))
    done = CliRunner().invoke(single, ["--run", "r", "--epoch", "last"])
    assert done.exit_code == 2
    assert "'last' is no epoch" in done.output
