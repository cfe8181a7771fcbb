"""``flowmill reward``: fits rewards on judgments of people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from configs.escaping import quoted, visible
from flows.cli.error_reporting import say
from flows.cli.options import AsJson, Overrides, Root

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
    from configs.reward_fit import load_fit
    from flows.environment import as_overrides, prepare_environment

    loaded = load_fit(config, [*(overrides or ()), *as_overrides(root, None)])
    prepare_environment()
    from flows.console import console, print_json
    from tasks.fitting.figures import accuracy_text
    from tasks.fitting.fit import copy_model, fit_reward

    made = fit_reward(loaded)
    if to is not None:
        copy_model(made, to)
    folder = made.folder if to is None else to.absolute()
    if as_json:
        print_json({"artifact": str(made.ref), "fit": made.named, "folder": str(folder), "new": made.new, **made.about})
        return
    kept = "" if made.new else ", committed before"
    console.print(f"{made.named}, {made.ref}{kept}: {accuracy_text(made.about)}")
    console.print(f"its card: {quoted(folder / 'README.md')}")
    if made.may_be_chance:
        console.print("note: this may be chance, so runs refuse it without the option 'unproven: true'. Judge more.")
    place = {"run": loaded.name} if to is None else {"path": str(folder)}
    options = {**place, **({"media": "latents"} if made.about["data"]["judged"] == "latents" else {})}
    console.print(
        f"rewards: {visible(json.dumps([{'name': 'fitted', 'options': options}]))}", markup=False, soft_wrap=True
    )
