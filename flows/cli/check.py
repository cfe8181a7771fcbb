"""``flowmill check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flowmill.configs.gc_tuning import without_collecting
from flowmill.configs.human_units import duration, size
from flowmill.configs.load import checked
from flowmill.configs.schema import RunConfig
from flowmill.flows.chained import chained, named, resolved_config
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import AsJson, Config, Overrides
from flowmill.flows.console import console, print_json, print_table
from flowmill.flows.environment import chosen_root
from flowmill.flows.requests import PipelineRequest

if TYPE_CHECKING:
    from flowmill.tasks.checks.idle_time import Idle
    from flowmill.tasks.checks.try_rewards import ScoringTime
    from flowmill.tasks.modalities.forward_cost import Cost
    from flowmill.tasks.modalities.memory import Memory


def check_command(
    path: Config,
    overrides: Overrides = None,
    *,
    gpu_memory: Annotated[
        float | None,
        typer.Option("--gpu-memory", help="List changes to fit a GPU with this memory.", metavar="GB", min=0, max=1e6),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of a local model again instead of trusting its file times.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the resolved config, its cost and memory, and whether it can run; or refuse it."""
    say(f"reading {path}", quiet=as_json)
    fields = {"config": str(path), "overrides": overrides or [], "root": chosen_root(None)}
    requests = chained(checked(fields, PipelineRequest, lambda mistake: "flowmill check"))
    configs = [resolved_config(each) for each in requests]
    from flowmill.tasks.checks.names import check_names, check_places

    data: dict[str, Any] = {}
    totals: dict[str, int] = {}
    for request, config in zip(requests, configs, strict=True):
        with named(config, configs), without_collecting():
            check_names(config, source=Path(request.config), overrides=request.overrides, later=True)
            estimate = _estimate(config, totals, gpu_memory=gpu_memory, deep=deep, as_json=as_json)
        data = {**estimate, "start": data} if data else estimate
    # Last: the cost of a config can be estimated before all files that it names exist.
    for config in configs:
        with named(config, configs):
            check_places(config)
    if len(configs) == 1 and config.model.start is not None:
        from flowmill.tasks.runs.start import check_start

        check_start(config)
    if as_json:
        print_json(data)
    else:
        console.print("The config can run.")


def _estimate(
    config: RunConfig, totals: dict[str, int], *, gpu_memory: float | None, deep: bool, as_json: bool
) -> dict[str, Any]:
    """Print the estimate of a run and return it as plain data; add its cost to the totals of the runs before it."""
    from flowmill.configs.components import reward_sections
    from flowmill.tasks.checks.check import check_plan
    from flowmill.tasks.checks.idle_time import idle_notes, idle_shares
    from flowmill.tasks.checks.memory import memory_advice, memory_and_notes
    from flowmill.tasks.checks.notes import cut_notes, padding_notes, training_notes
    from flowmill.tasks.checks.try_rewards import loads_model, time_rewards, try_rewards
    from flowmill.tasks.inputs.shapes import shape_of, with_columns
    from flowmill.tasks.specs.plan import RunPlan

    plan = RunPlan(config := with_columns(config))
    cost = check_plan(plan, rewards=False)
    scoring = time_rewards(plan, try_rewards(plan, load=False), cost)
    idle = idle_shares(plan, cost) if config.execution.ranks > 1 else []
    notes = [
        *training_notes(plan, updates=cost.updates),
        *padding_notes(config, cost),
        *idle_notes(config, cost, idle),
        *cut_notes(plan),
        *(
            f"reward '{section.slot}' was not tried, as it loads a model; 'flowmill run' tries it before it samples."
            for section in reward_sections(config)
            if loads_model(section)
        ),
    ]
    changed = _changed(config) if deep else None
    memory, memory_notes = memory_and_notes(plan, reference=cost.reference)
    notes += memory_notes
    shape = None if config.data is None else shape_of(config)
    if as_json:
        needs = None if memory is None else memory.as_dict()
        return {
            "config": config.model_dump(mode="json"),
            "cost": cost.as_dict(),
            "scoring": [asdict(each) for each in scoring],
            "idle": {each.stage: each.share for each in idle},
            "memory": needs,
            **({} if shape is None else {"data": {"shape": shape[0], "columns": shape[1]}}),
            "notes": notes,
            **({"changed_files": changed} if deep else {}),
        }
    console.print(config.to_yaml())
    if shape is not None:
        console.print(f"data.train is read as {shape[0]}.", highlight=False, markup=False)
    _print_cost(cost, config.run.epochs, totals)
    _print_scoring(scoring)
    _print_idle(config, idle)
    if memory is not None:
        _print_memory(memory)
        if gpu_memory is not None:
            _print_advice(memory_advice(memory, int(gpu_memory * 1e9)), gpu_memory)
    if deep:
        _print_changed(changed)
    for note in notes:
        console.print(f"note: {note}")
    counts = ", ".join(f"{split} {count}" for split, count in cost.prompts.items() if count)
    console.print(f"prompts: {counts}.")
    return {}


def _print_cost(cost: Cost, epochs: int, totals: dict[str, int]) -> None:
    """Print the cost of a run, and of all runs together if there are several; add it to their totals."""
    together = ["with the runs before it"] if totals else []
    table = Table("quantity", "per epoch", "whole run", *together, title="Cost")
    count = "{:,}".format
    of_epochs = [
        ("samples generated", cost.samples_per_epoch),
        ("model rows, rollout", cost.rollout_forwards),
        *([("model rows, values", cost.value_forwards)] if cost.value_forwards else []),
        ("model rows with gradient, at most", cost.optimize_forwards),
        ("model rows, reference", cost.reference_forwards),
        *([("image model rows, drawing texts", cost.drawing_forwards)] if cost.drawing_forwards else []),
        ("trajectory shards", cost.shards_per_epoch),
    ]
    of_evaluations = [
        ("model rows, evaluation", cost.evaluate_forwards),
        *([("model rows, held-out loss", cost.validate_forwards)] if cost.validate_forwards else []),
        *([("image model rows, evaluation", cost.depicting_forwards)] if cost.depicting_forwards else []),
    ]
    rows = [
        *((label, count(each), each * epochs) for label, each in of_epochs),
        *((label, f"{each:,} each", each * cost.evaluations) for label, each in of_evaluations),
        ("optimizer updates", "", cost.updates),
    ]
    for label, each, whole in rows:
        totals[label] = totals.get(label, 0) + whole
        table.add_row(label, each, count(whole), *(count(totals[label]) for _ in together))
    if cost.stores_latents:
        table.add_row("latents stored", size(cost.latent_bytes_per_epoch), size(cost.latent_bytes))
        table.add_row("latents per million samples", "", size(cost.latent_bytes_per_million))
    print_table(table)


def _print_scoring(times: Sequence[ScoringTime]) -> None:
    if not times:
        return
    table = Table("reward", "per sample", "per epoch", "at a time", title="Scoring, by a made-up sample")
    for each in times:
        table.add_row(
            each.reward, f"{each.seconds:.2g} s", f"{duration(each.seconds * each.samples)} of CPU", str(each.workers)
        )
    print_table(table)


def _print_idle(config: RunConfig, parts: Sequence[Idle]) -> None:
    if not parts:
        return
    title = f"Idle share of {config.execution.ranks} processes"
    table = Table("stage", "parts", "idle", title=title)
    for each in parts:
        table.add_row(each.stage, f"{each.parts:,}", f"{each.share:.0%}")
    print_table(table)


def _changed(config: RunConfig) -> list[str] | None:
    """Return local files of the model and of options that changed with equal size and time; None if none is local."""
    from flowmill.tasks.inputs.option_paths import changed_places
    from flowmill.tasks.inputs.source_prompts import source_prompts
    from flowmill.tasks.inputs.weight_sources import changed_files

    prompts = source_prompts(config).values()
    stages = [
        changed_files(config.model),
        changed_places(config, lambda: (p.metadata for each in prompts for p in each)),
    ]
    return None if stages == [None, None] else [name for names in stages for name in names or []]


def _print_changed(changed: list[str] | None) -> None:
    if changed is None:
        console.print("local files: the config names none, so there are no file times to verify.")
    elif changed:
        names = ", ".join(changed)
        console.print(f"local files: {names} changed without a change of size or time; runs see it from now on.")
    else:
        console.print("local files: unchanged since last read.")


def _print_memory(memory: Memory) -> None:
    trained = "all" if memory.trained == memory.parameters else f"{memory.trained / 1e6:,.1f} million"
    console.print(
        f"model: {memory.parameters / 1e9:,.2f} billion parameters, {trained} trained; {memory.tokens:,} tokens"
    )
    phases = memory.phases
    table = Table("memory per rank, estimated", *phases, title="Memory")
    for label, usage in memory.lines.items():
        table.add_row(label, *(size(usage[phase]) if phase in usage else "" for phase in phases))
    table.add_row("together", *map(size, phases.values()))
    print_table(table)
    if memory.host:
        parts = ", ".join(f"{label} {size(count)}" for label, count in memory.host.items())
        console.print(f"host memory per rank, at most, in addition to Python and the driver: {parts}")


def _print_advice(changes: Sequence[str], gpu_memory: float) -> None:
    for change in changes:
        console.print(f"does not fit {gpu_memory:g} GB; {change}")
    if not changes:
        console.print(f"fits {gpu_memory:g} GB per GPU.")
