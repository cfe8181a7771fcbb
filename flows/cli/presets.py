"""``flowmill presets``: the configs that come with flowmill."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import command
from flowmill.configs.load import load_config
from flowmill.configs.presets import preset_files, preset_gpu, preset_line, preset_text, presets
from flowmill.configs.suggestions import did_you_mean
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import AsJson, Long
from flowmill.flows.console import console, print_json, print_table
from flowmill.tasks.inputs.policy_kind import kind_name


def presets_command(
    name: Annotated[
        str | None, typer.Argument(help="Print the YAML of this preset; all presets when absent.", metavar="[PRESET]")
    ] = None,
    *,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Only presets of this kind of policy, as in --long.", metavar="KIND"),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only presets whose model or family contains TEXT.", metavar="TEXT")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", help="Only presets that fit a GPU with this memory; 0: a CPU.", metavar="GB", min=0),
    ] = None,
    long: Long = False,
    as_json: AsJson = False,
) -> None:
    """Print each preset on a line: name, model, algorithm and memory; or print one preset."""
    if name is not None:
        _show(name, as_json=as_json)
        return
    every = [_preset(name) for name in presets()]
    kinds = {preset["kind"]: None for preset in every}
    if kind is not None and kind not in kinds:
        raise ConfigError(f"--kind '{kind}': there is no such kind. {did_you_mean(kind, kinds)}")
    matches = [
        preset
        for preset in every
        if kind in (None, preset["kind"])
        and (model or "").casefold() in f"{preset['model']} {preset['family']}".casefold()
        and (memory is None or _gigabytes(preset["memory"]) <= memory)
    ]
    if as_json:
        print_json(matches)
        return
    if not matches:
        console.print("No preset matches. 'flowmill presets' lists all.")
        return
    columns = ("preset", "model", "algorithm", "memory", *(("kind", "family", "description") if long else ()))
    table = Table(*columns, box=None, pad_edge=False)
    for each in matches:
        cells = each if long else {**each, "model": each["model"].rpartition("/")[2]}
        table.add_row(*(cells[column] for column in columns))
    print_table(table, cut=("model",), complete=long)


def _show(name: str, *, as_json: bool) -> None:
    text = preset_text(preset_files(name)[0].removesuffix(".yaml"))
    if as_json:
        print_json({**_preset(name), "text": text})
        return
    for line in text.splitlines():
        say(line)
    say(f"run it: {command('flowmill', 'run', name)}; copy it: {command('flowmill', 'init', name)}")


def _preset(name: str) -> dict[str, str]:
    config = load_config(name)
    build = config.model.build
    return {
        "preset": name,
        "kind": kind_name(config),
        "family": config.model.policy,
        "model": str(config.model.path) if build is None else f"{config.model.policy}, built",
        "algorithm": config.optimize.algorithm.name,
        "memory": preset_gpu(name),
        "description": preset_line(name),
    }


def _gigabytes(memory: str) -> float:
    number = memory.removesuffix(" GB")
    return float(number) if number != memory else 0.0
