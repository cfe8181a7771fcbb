"""A preset of sums beside TRL's GRPOTrainer: the same base model, prompts, reward and settings, in CPU seconds.

``python -m tools.benchmarks.language [--seeds N] [--epochs N]`` prints one table; TRL is no dependency, and without it
the table says so. Of both sides start-up and evaluations are left out, of ours stages, commits and tracking are not,
nor what the servers take that a run starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from configs.load import load_config
from configs.schema import RunConfig
from tools.benchmarks.learning import flowmill

ROOT = Path(__file__).parent.parent.parent
PRESET = "configs/addition_grpo.yaml"


def ours(root: str, name: str, settings: list[str]) -> float:
    """Return the CPU seconds of a command, with those of every process it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    flowmill("run", PRESET, "--root", root, "--name", name, *settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def exact(root: str, name: str) -> tuple[float, float]:
    """Return held-out exact match before a run and after it."""
    found = json.loads(flowmill("status", name, "--root", root, "--json"))["evaluations"]
    first, last = found["0"], found[max(found, key=int)]
    return first["heldout"]["exact_text"]["exact"], last["heldout"]["exact_text"]["exact"]


def trained(root: str, seed: int, epochs: int) -> tuple[float, float]:
    """Return the CPU seconds and the last accuracy of our run: what more epochs than one cost more than one."""
    settings = ["--set", f"run.seed={seed}", "--set", f"evaluate.every={epochs}"]
    first = ours(root, f"one-{seed}", [*settings, "--set", "run.epochs=1"])
    all_of_them = ours(root, f"all-{seed}", [*settings, "--set", f"run.epochs={epochs}"])
    return (all_of_them - first) * epochs / max(1, epochs - 1), exact(root, f"all-{seed}")[1]


def peer(base: Path, config: RunConfig, seed: int) -> tuple[float, float]:
    """Return the same of TRL, in a process of its own."""
    command = [sys.executable, "-m", "tools.benchmarks.language", "--peer", str(base), "--seed", str(seed)]
    command += ["--epochs", str(config.run.epochs)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seconds, accuracy = json.loads(printed.splitlines()[-1])
    return seconds, accuracy


def train_peer(base: Path, config: RunConfig, seed: int) -> tuple[float, float]:
    """Train with TRL in this process."""
    import torch
    from datasets import Dataset
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    # TRL is given text with the token that texts begin with.
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    read = lambda path: [json.loads(line) for line in Path(str(path)).read_text().splitlines()]  # noqa: E731
    train, order = read(config.prompts.train), random.Random(seed)
    rollout, optimize = config.rollout, config.optimize
    epochs, updates = config.run.epochs, optimize.updates_per_epoch
    rows = [row for _ in range(epochs) for row in order.sample(train, rollout.prompts_per_epoch)]
    assert optimize.schedule is not None

    def right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [
            float(ids[-1] == 2 and tokenizer.decode(ids[:-1]) == text)
            for ids, text in zip(completion_ids, answer, strict=True)
        ]

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rollout.prompts_per_epoch * rollout.group_size // updates,
        steps_per_generation=updates,
        num_generations=rollout.group_size,
        learning_rate=optimize.learning_rate,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": optimize.learning_rate * optimize.schedule.final, "power": 1.0},
        max_grad_norm=optimize.max_grad_norm,
        weight_decay=optimize.weight_decay,
        beta=0.0,
        loss_type="bnpo",
        max_completion_length=5,
        top_k=0,
        max_steps=epochs * updates,
        save_strategy="no",
        logging_steps=200,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": f"<bos>{row['prompt']}", "answer": row["answer"]} for row in rows])
    trainer = GRPOTrainer(
        model=model, reward_funcs=right, args=settings, train_dataset=data, processing_class=tokenizer
    )
    begun = time.process_time()
    trainer.train()
    seconds = time.process_time() - begun
    held = read(config.prompts.heldout)
    asked = tokenizer([f"<bos>{row['prompt']}" for row in held], return_tensors="pt", padding=True)
    made = model.eval().generate(**asked, do_sample=False, max_new_tokens=5)[:, asked.input_ids.shape[1] :].tolist()
    ended = [ids[: ids.index(2) + 1] if 2 in ids else ids for ids in made]
    return seconds, sum(right(ended, [row["answer"] for row in held])) / len(held)


def table(root: str, seeds: int, epochs: int) -> str:
    """Return both sides with every seed as Markdown."""
    config = load_config(ROOT / PRESET, [f"run.epochs={epochs}"])
    has_peer = importlib.util.find_spec("trl") is not None
    lines = ["| seed | before | ours, CPU s | after | TRL, CPU s | after | ratio |", "|---|--:|--:|--:|--:|--:|--:|"]
    # Makes the base model, which the first run measured would make beside.
    flowmill("run", PRESET, "--root", root, "--name", "base", "--set", "run.epochs=1")
    for seed in range(seeds):
        seconds, after = trained(root, seed, epochs)
        (folder,) = Path(root).glob("bases/*/*/pipeline")
        row = f"| {seed} | {exact(root, f'all-{seed}')[0]:.2f} | {seconds:.0f} | {after:.2f} "
        if has_peer:
            theirs, accuracy = peer(folder, config, seed)
            row += f"| {theirs:.0f} | {accuracy:.2f} | {seconds / theirs:.2f} |"
        else:
            row += "| TRL is not installed | | |"
        lines.append(re.sub(r"\s+\|$", " |", row))
        sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or train one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=load_config(ROOT / PRESET).run.epochs)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        config = load_config(ROOT / PRESET, [f"run.epochs={options.epochs}"])
        sys.stdout.write(json.dumps(train_peer(options.peer, config, options.seed)) + "\n")
        return
    with tempfile.TemporaryDirectory() as root:
        sys.stdout.write(table(root, options.seeds, options.epochs))


if __name__ == "__main__":
    main()
