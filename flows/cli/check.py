"""``flowmill check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from configs.load import dump_yaml, load_config
from flows.cli.console import console, print_json, size


def check_command(path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the resolved config and the cost, or refuse it."""
    config = load_config(path, overrides)
    from tasks.check import check_config

    cost = check_config(config)
    if as_json:
        print_json({"config": config.model_dump(mode="json"), "cost": cost.as_dict()})
        return
    console.print(dump_yaml(config), markup=False)
    table = Table("what", "per epoch", "whole run", title="Cost", title_justify="left")
    epochs = config.run.epochs
    rows = [
        ("images generated", cost.samples_per_epoch),
        ("denoiser rows, rollout", cost.rollout_forwards),
        ("denoiser rows with gradient, at most", cost.optimize_forwards),
        ("denoiser rows, reference", cost.reference_forwards),
        ("trajectory shards", cost.shards_per_epoch),
    ]
    for label, count in rows:
        table.add_row(label, f"{count:,}", f"{count * epochs:,}")
    table.add_row(
        "denoiser rows, evaluation",
        f"{cost.evaluate_forwards:,} each",
        f"{cost.evaluate_forwards * cost.evaluations:,}",
    )
    table.add_row("optimizer updates", "", f"{cost.updates:,}")
    table.add_row("latents stored", size(cost.latent_bytes_per_epoch), size(cost.latent_bytes))
    console.print(table)
    counts = ", ".join(f"{split} {count}" for split, count in cost.prompts.items() if count)
    console.print(f"prompts: {counts}. The config can run.")
