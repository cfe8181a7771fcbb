"""Flow-GRPO and flowmill on the same work, side by side: ``python -m tools.benchmarks.peers --flow-grpo CHECKOUT``.

The checkout is yours, of the script of July 2025 (commit ac4c86e); nothing of it is copied or changed. Same base,
prompts, reward, shapes, batches and updates (``tools.benchmarks.work``), one thread, turn by turn. CPU seconds are
those of a process with all its children: flowmill's have Prefect's server, MLflow and every commit in them. They are
of the epochs after the first, from the end of one to the end of the next. Rows through the denoisers are counted on
both sides; there is no table where they are not the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowmill.tasks.training.policy_moves import estimate_rows
from tools.benchmarks.work import PROMPTS, WORK, build_base

ROOT = Path(__file__).parent.parent.parent
#: How many are trained; the first is left out, on both sides.
_EPOCHS = 2
#: Ours, by what of it differs.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "flowmill, both halves": {"optimize": {"guidance_gradient": "both"}},
    "flowmill, both halves, compiled": {"optimize": {"guidance_gradient": "both"}, "model": {"compile": True}},
    "flowmill, conditional": {"optimize": {"guidance_gradient": "conditional"}},
    "flowmill, conditional, stored predictions": {
        "optimize": {"guidance_gradient": "conditional"},
        "rollout": {"unconditional": True},
    },
    "flowmill, conditional, stored predictions, compiled": {
        "optimize": {"guidance_gradient": "conditional"},
        "rollout": {"unconditional": True},
        "model": {"compile": True},
    },
}
THEIRS = "Flow-GRPO"


def take(command: Sequence[str], folder: Path) -> tuple[str, float]:
    """Run a command with one thread; return what it printed, and the MiB of the largest of its processes.

    Raises:
        SystemExit: it failed.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TQDM_DISABLE": "1"}
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, **settings}, stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return log.read_text(), used.ru_maxrss / 1024


def theirs(checkout: Path, base: Path) -> dict[str, Any]:
    """Train Flow-GRPO; return CPU seconds and rows of an epoch, and the peak."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tools.benchmarks.flow_grpo", str(checkout), str(base), folder, str(_EPOCHS)]
        output, peak = take(command, Path(folder))
    return {**_mean(json.loads(output.strip().splitlines()[-1])), "peak": peak}


def ours(base: Path, variant: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Train flowmill; return the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, counts = folder / "peers.yaml", folder / "epochs.json"
        path.write_text(yaml.safe_dump(config(base, folder, _EPOCHS, variant)))
        _, peak = take(["-m", "tools.benchmarks.ours", str(counts), "run", str(path), "--quiet"], folder)
        return {**_mean(json.loads(counts.read_text())), "peak": peak}


def bare_name(variant: str) -> str:
    """Return the name of the row of a variant's bare compute."""
    return f"{variant.replace('flowmill', 'bare compute')}, adapters merged"


def bare(base: Path, variant: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the rows of a variant and nothing else (``tools.benchmarks.bare``); return the same."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tools.benchmarks.bare", str(base), json.dumps(variant)]
        output, peak = take(command, Path(folder))
    return {**json.loads(output.strip().splitlines()[-1]), "peak": peak}


def _mean(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(epoch[name] for epoch in epochs) for name in epochs[0]}


def config(base: Path, folder: Path, epochs: int, variant: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return flowmill's config of the work; evaluations, which theirs has none of, are of one image."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    size, batch = WORK["size"], WORK["batch"]
    options = {"max_sequence_length": WORK["text_tokens"]}
    model = {"policy": "sd3", "path": str(base), "height": size, "width": size, "options": options}
    shape = {name: WORK[name] for name in ("prompts_per_epoch", "group_size", "steps")}
    made: dict[str, dict[str, Any]] = {
        "run": {"epochs": epochs},
        "store": {"root": str(folder / "store")},
        "model": {**model, "guidance_scale": WORK["guidance_scale"], "lora": WORK["lora"]},
        "prompts": {"train": str(folder / "prompts.txt")},
        "rollout": shape,
        "optimize": {name: WORK[name] for name in ("updates_per_epoch", "learning_rate")},
        "evaluate": {"every": 10**6, "samples": 1, "images": 1},
        "execution": {"rollout_batch_size": batch, "micro_batch_size": batch, "threads": 1},
    }
    for section, settings in variant.items():
        made[section] = {**made[section], **settings}
    return {**made, "rewards": [{"name": "jpeg_compressibility"}]}


def check_work(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that everybody computed the same rows, but for those that are left out on purpose.

    Raises:
        SystemExit: somebody did not.
    """
    samples = WORK["prompts_per_epoch"] * WORK["group_size"]
    sampled, trained = 2 * samples * WORK["steps"], samples * (WORK["steps"] - 1)
    spared = trained // WORK["updates_per_epoch"]
    for name, each in found.items():
        expected = (2 * trained, sampled)
        if "conditional" in name:
            expected = (trained, sampled + trained - ("stored predictions" in name) * spared)
        if name != THEIRS:
            # The KLs of the policy to the previous one and to the base model, with guidance.
            expected = (expected[0], expected[1] + 2 * 2 * estimate_rows(trained))
        if (each["with_gradient"], each["without"]) != expected:
            raise SystemExit(
                f"{name} computed {each['with_gradient']} rows with gradient and {each['without']} without, not "
                f"{expected}: not the same work, so there is nothing to compare."
            )


def table(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table: the least of each column, and ratios of pairs of a round."""
    heads = [
        "CPU s per epoch",
        "over Flow-GRPO's",
        "over the bare compute's",
        "peak MiB",
        "rows with gradient",
        "without",
    ]
    text = f"| | {' | '.join(heads)} |\n{(len(heads) + 1) * '|---'}|\n"
    for name in rounds[0]:
        least = {key: min(each[name][key] for each in rounds) for key in ("cpu", "peak", "with_gradient", "without")}
        over = [_ratios(rounds, name, other) for other in (THEIRS, bare_name(name))]
        text += f"| {name} | {least['cpu']:.1f} | {' | '.join(over)} | {least['peak']:.0f} |"
        text += f" {least['with_gradient']:.0f} | {least['without']:.0f} |\n"
    return text


def _ratios(rounds: Sequence[Mapping[str, Mapping[str, Any]]], name: str, other: str) -> str:
    """Return the ratio of the least CPU seconds of two rows, and those of the rounds; nothing without the other."""
    if other not in rounds[0]:
        return ""
    ratios = sorted(each[name]["cpu"] / each[other]["cpu"] for each in rounds)
    least = min(each[name]["cpu"] for each in rounds) / min(each[other]["cpu"] for each in rounds)
    return f"{least:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def compare(checkout: Path | None, rounds: int, only: Sequence[str]) -> str:
    """Return the table; without a checkout the one beside the bare compute."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        build_base(base)
        for number in range(rounds):
            each = {} if checkout is None else {THEIRS: theirs(checkout.resolve(), base)}
            for variant in only:
                each[variant] = ours(base, VARIANTS[variant])
                each[bare_name(variant)] = bare(base, VARIANTS[variant])
            check_work(each)
            found.append(each)
            sys.stderr.write(f"round {number + 1} of {rounds}: {json.dumps(each)}\n")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{rounds} rounds on {os.cpu_count()} cores, load {load} at the end\n\n{table(found)}"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flow-grpo", type=Path, help="folder of a checkout of Flow-GRPO")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()
    sys.stdout.write(compare(options.flow_grpo, options.rounds, options.only))


if __name__ == "__main__":
    main()
