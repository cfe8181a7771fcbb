"""``flowmill reward``: fits rewards on judgments of people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flowmill.configs.escaping import quoted, visible
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import AsJson, Overrides, Root

reward_app = typer.Typer(help="Fit rewards of your own.", no_args_is_help=True)


@reward_app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="YAML file: data, backbone, training.", metavar="CONFIG")],
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to copy the reward to, in place of an earlier copy.")
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Fit a reward on preferences or ratings, commit it to the store, and print its figures on held-out judgments."""
    say(f"reading {config}", quiet=as_json)
    from flowmill.configs.reward_fit import load_fit
    from flowmill.flows.environment import as_overrides, prepare_environment

    loaded = load_fit(config, [*(overrides or ()), *as_overrides(root, None)])
    prepare_environment()
    from flowmill.flows.console import console, print_json
    from flowmill.tasks.export.provenance import accuracy_text
    from flowmill.tasks.fitting.figures import equal_text
    from flowmill.tasks.fitting.fit import check_copy, copy_model, fit_reward

    if to is not None:
        check_copy(to)
    fitted = fit_reward(loaded)
    if to is not None:
        copy_model(fitted, to)
    folder = fitted.folder if to is None else to.absolute()
    if as_json:
        print_json(
            {
                "artifact": str(fitted.ref),
                "fit": fitted.named,
                "folder": str(folder),
                "new": fitted.new,
                **fitted.summary,
            }
        )
        return
    state = "" if fitted.new else ", committed before"
    console.print(f"{fitted.named}, {fitted.ref}{state}: {accuracy_text(fitted.summary)}{equal_text(fitted.summary)}")
    console.print(f"its card: {quoted(folder / 'README.md')}")
    if fitted.may_be_chance:
        console.print(
            "note: this may be chance, so runs refuse it without the option 'unproven: true'. "
            "Judge samples of more prompts, several of each."
        )
    place = {"run": loaded.name} if to is None else {"path": str(folder)}
    options = {**place, **({"media": "latents"} if fitted.summary["data"]["judged"] == "latents" else {})}
    console.print(
        f"rewards: {visible(json.dumps([{'name': 'fitted', 'options': options}]))}", markup=False, soft_wrap=True
    )
