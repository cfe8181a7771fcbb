"""The tables of docs/gpus.md, computed from the presets: ``python -m pages.gpu_page`` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.checks.memory import estimate_memory
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.modalities.memory import SCORE, Memory
from flowmill.tasks.specs.plan import RunPlan
from tools.benchmarks.traffic import expected

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gpus.md"
_FULL = {
    path.stem: kind_name(config)
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if (config := load_config(path)).model.path is not None
}
PRESETS = [name for name, kind in _FULL.items() if kind == "diffusion"]
LANGUAGE = [name for name, kind in _FULL.items() if kind != "diffusion"]
#: Phases of a run of a language model.
LANGUAGE_PHASES = ("rollout", "re-score", "render", SCORE, "value", "optimize")
#: Memory of GPUs in use, GB.
SIZES = (24, 48, 80, 141)
PHASES = ("encode", "rollout", "decode", SCORE, "optimize")
#: The part of a GPU's memory a run may take: the rest is for the driver, NCCL and fragments.
USABLE = 0.9
EIGHT = ("execution.processes=8", "execution.strategy=fsdp")
#: Bytes a second between two GPUs: of one machine (NVLink 4), and of two (400 Gb/s each).
INSIDE, BETWEEN = 450e9, 50e9
#: Presets whose traffic is listed: one of each size.
TRAFFIC = ("sd35_medium", "flux1_dev", "qwen_image", "wan22_a14b")
#: Presets with quantized weights, and the batches with which they take least.
QUANTIZED = ("sd35_medium", "flux1_dev", "qwen_image", "wan22_a14b", "qwen_7b_grpo")
_LEAST = (
    *(f"execution.{name}_batch_size=1" for name in ("encode", "rollout", "decode", "micro")),
    *("execution.processes=1", "execution.strategy=ddp", "model.gradient_checkpointing=true"),
)


def gigabytes(number: float) -> str:
    """Return bytes as the page writes them."""
    return f"{number / 1e9:.1f}"


def line(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cells) + " |"


def memory_of(config: RunConfig, *, compared: bool = False) -> Memory:
    """Return the memory of a config with its rewards; compared: with the base model, if its algorithm says so."""
    plan = RunPlan(config)
    memory = estimate_memory(plan, reference=compared and plan.requires.reference)
    assert memory is not None
    return memory


def memory_row(preset: str) -> str:
    """Return a preset's row of the first table."""
    path = ROOT / "configs" / f"{preset}.yaml"
    one, eight = (memory_of(load_config(path, extra)) for extra in ((), EIGHT))
    phases = [gigabytes(one.phases[name]) if name in one.phases else "" for name in PHASES]
    cells = [f"`{preset}`", f"{one.parameters / 1e9:.1f}", *phases, smallest(one), gigabytes(eight.phases["optimize"])]
    return line(cells)


def language_row(preset: str) -> str:
    """Return the row of a preset that trains a language model, in a table of its own."""
    config = load_config(ROOT / "configs" / f"{preset}.yaml")
    memory = memory_of(config, compared=True)
    phases = [gigabytes(memory.phases[name]) if name in memory.phases else "" for name in LANGUAGE_PHASES]
    return line([f"`{preset}`", f"{memory.parameters / 1e9:.1f}", *phases, smallest(memory)])


def quantized_row(preset: str) -> str:
    """Return a preset's row of the table of quantizers: GB of the largest phase, and the smallest GPU it fits."""
    path, texts = ROOT / "configs" / f"{preset}.yaml", preset in LANGUAGE
    cells = [f"`{preset}`"]
    for name in ("null", "int8", "int4", "nf4"):
        both = f"model.quantize={{name: {name}{'' if texts else f', text_encoders: {name}'}}}"
        config = load_config(path, (*_LEAST, both, *(["model.lora={}"] if texts else [])))
        memory = memory_of(config, compared=texts)
        cells.append(f"{gigabytes(max(memory.phases.values()))}: {smallest(memory)}")
    return line(cells)


def smallest(memory: Memory) -> str:
    """Return the smallest GPU every phase fits."""
    most = max(memory.phases.values())
    return next((f"{size} GB" for size in SIZES if most <= USABLE * size * 1e9), "none of them")


def traffic_row(preset: str) -> str:
    """Return a preset's row of the second table: bytes of an update of one micro-batch, and seconds on links."""
    config = load_config(ROOT / "configs" / f"{preset}.yaml")
    memory = memory_of(config)
    number = 4 if config.model.dtype == "float32" else 2
    sizes = {"frozen": memory.parameters * number, "trained": memory.trained * 4, "tokens": 0, "attentions": 0}
    cells = [f"`{preset}`"]
    for strategy in ("ddp", "fsdp"):
        said = expected(strategy, **sizes)
        # A ring sends a tensor that is added up twice, one that is put together or taken apart once.
        sent = sum(count * (2 if kind == "all-reduce" else 1) for kind, count in said.items())
        cells += [gigabytes(sent), f"{sent / INSIDE:.2f}", f"{sent / BETWEEN:.2f}"]
    return line(cells)


def tables(rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the tables as lines, by the name of their place."""
    heads = {
        "memory": ["preset", "billion parameters", *PHASES, "one GPU of", "optimize on 8, fsdp"],
        "language": ["preset", "billion parameters", *LANGUAGE_PHASES, "one GPU of"],
        "quantized": ["preset", "dtype of the preset", "int8, float8", "int4", "nf4"],
        "traffic": ["preset", "ddp, GB", "s inside", "s between", "fsdp, GB", "s inside", "s between"],
    }
    written = {
        "memory": rows,
        "language": map(language_row, LANGUAGE),
        "quantized": map(quantized_row, QUANTIZED),
        "traffic": map(traffic_row, TRAFFIC),
    }
    return {name: [line(head), "|" + "---|" * len(head), *written[name]] for name, head in heads.items()}


def main() -> None:
    """Replace the tables of the page."""
    text = PAGE.read_text()
    for name, table in tables([memory_row(preset) for preset in PRESETS]).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(table) + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
