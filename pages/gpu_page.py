"""The tables of docs/gpus.md, made from the presets: ``python -m pages.gpu_page`` writes them anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.load import load_config
from configs.schema import RunConfig
from tasks.inputs.components import make_algorithm
from tasks.kinds.diffusion.memory import Activations, DenoiserMemory, denoiser_memory, measure_activations
from tasks.preflight.memory import optimizer_sizes
from tests.benchmarks.traffic import expected

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gpus.md"
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if load_config(path).model.path is not None)
#: Memory of GPUs in use, GB.
SIZES = (24, 48, 80, 141)
#: Of a GPU's memory, what a run may take: the rest is for the driver, NCCL and fragments.
USABLE = 0.9
EIGHT = ("execution.processes=8", "execution.strategy=fsdp")
#: Bytes a second between two GPUs: of one machine (NVLink 4), and of two (400 Gb/s each).
INSIDE, BETWEEN = 450e9, 50e9
#: Presets whose traffic is told: one of each size.
TRAFFIC = ("sd35_medium", "flux1_dev", "qwen_image", "wan22_a14b")


def gigabytes(number: float) -> str:
    """Return bytes as the page writes them."""
    return f"{number / 1e9:.1f}"


def memory_of(config: RunConfig, activations: Activations | None = None) -> DenoiserMemory:
    """Return the memory of a config, whose activations may be known."""
    requires, optimizer = make_algorithm(config).requires, optimizer_sizes(config)
    found = denoiser_memory(config, requires, optimizer, reference=False, activations=activations)
    assert found is not None
    return found


def memory_row(preset: str, activations: Activations) -> str:
    """Return a preset's row of the first table."""
    path = ROOT / "configs" / f"{preset}.yaml"
    one, eight = (memory_of(load_config(path, extra), activations) for extra in ((), EIGHT))
    phases = [gigabytes(size) for size in one.phases.values()]
    cells = [f"`{preset}`", f"{one.parameters / 1e9:.1f}", *phases, smallest(one), gigabytes(eight.optimize)]
    return "| " + " | ".join(cells) + " |"


def smallest(memory: DenoiserMemory) -> str:
    """Return the smallest GPU every phase fits."""
    most = max(memory.phases.values())
    return next((f"{size} GB" for size in SIZES if most <= USABLE * size * 1e9), "none of them")


def traffic_row(preset: str) -> str:
    """Return a preset's row of the second table: bytes of an update of one micro-batch, and seconds on links."""
    config = load_config(ROOT / "configs" / f"{preset}.yaml")
    known = memory_of(config, Activations(sampling=0, training=0, decoding=0))
    number = 4 if config.model.dtype == "float32" else 2
    sizes = {"frozen": known.parameters * number, "trained": known.trained * 4, "tokens": 0, "attentions": 0}
    cells = [f"`{preset}`"]
    for strategy in ("ddp", "fsdp"):
        said = expected(strategy, **sizes)
        # A ring sends a tensor that is added up twice, one that is put together or taken apart once.
        sent = sum(count * (2 if kind == "all-reduce" else 1) for kind, count in said.items())
        cells += [gigabytes(sent), f"{sent / INSIDE:.2f}", f"{sent / BETWEEN:.2f}"]
    return "| " + " | ".join(cells) + " |"


def tables(rows: Sequence[str]) -> list[str]:
    """Return both tables as lines."""
    head = [
        "preset",
        "billion parameters",
        "encode",
        "rollout",
        "decode",
        "optimize",
        "one GPU of",
        "optimize on 8, fsdp",
    ]
    links = ["preset", "ddp, GB", "s inside", "s between", "fsdp, GB", "s inside", "s between"]
    first = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows]
    second = ["| " + " | ".join(links) + " |", "|" + "---|" * len(links), *(traffic_row(preset) for preset in TRAFFIC)]
    return [*first, "<!-- second -->", *second]


def main() -> None:
    """Replace the tables of the page."""
    rows = []
    for preset in PRESETS:
        activations = measure_activations(load_config(ROOT / "configs" / f"{preset}.yaml"))
        assert activations is not None
        rows.append(memory_row(preset, activations))
    lines = tables(rows)
    split = lines.index("<!-- second -->")
    text = PAGE.read_text()
    for name, table in (("memory", lines[:split]), ("traffic", lines[split + 1 :])):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(table) + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
