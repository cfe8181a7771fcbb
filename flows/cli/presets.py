"""``flowmill presets``: what configs come with flowmill."""

from __future__ import annotations

from rich.table import Table

from configs.load import load_config
from configs.presets import preset_gpu, preset_line, presets
from flows.console import print_json, print_table


def presets_command(*, as_json: bool) -> None:
    """Print each preset on a line: name, model, algorithm, memory, and what it is."""
    found = []
    for name in presets():
        config = load_config(name)
        build = config.model.build
        model = config.model.path if build is None else f"{config.model.policy}, built"
        algorithm = config.optimize.algorithm.name
        found.append((name, str(model), algorithm, preset_gpu(name), preset_line(name)))
    columns = ("preset", "model", "algorithm", "memory", "what it is")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in found])
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in found:
        table.add_row(*row)
    print_table(table, folding=("what it is",))
