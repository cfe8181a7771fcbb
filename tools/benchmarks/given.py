"""DPO on given texts compared with TRL's DPOTrainer: the same base model, rows, order and settings.

``python -m tools.benchmarks.given`` prints losses and CPU seconds. TRL is no dependency: put it on ``PYTHONPATH``, for
example with ``pip install --no-deps --target FOLDER trl``. Of ours the stage ``optimize`` counts, of TRL ``train()``:
both compute the reference with every update. Reading and encoding the rows is left out on both sides.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowmill.configs.load import load_config
from tests.support.inside import cpu, make_stage, prepare
from tools.benchmarks.learning import ROOT

PAIRS, PER_UPDATE, RATE, BETA = 1024, 32, 1e-4, 0.1
UPDATES = PAIRS // PER_UPDATE
Rows = list[dict[str, str]]


def pairs() -> Rows:
    """Return sums with the right answer and a wrong one."""
    draw, lines = random.Random(0), (ROOT / "configs/prompts/addition-train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:PAIRS]]
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + draw.randint(1, 9))}
        for row in rows
    ]


def ours(folder: Path) -> tuple[float, list[float], Path, Rows]:
    """Train in this process; return CPU seconds, the loss of every update, the base model, and the rows in order."""
    from flowmill.tasks.stages.stage_run import StageRun
    from flowmill.tasks.training.data import TrainingData

    rows = pairs()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"store.root={folder / 'store'}",
        "run={name: dpo, epochs: 1}",
        f"data={{train: {folder / 'pairs.jsonl'}, chosen: chosen, rejected: rejected}}",
        f"optimize={{algorithm: {{name: dpo, options: {{beta: {BETA}}}}}, learning_rate: {RATE}, weight_decay: 0.0, "
        f"updates_per_epoch: {UPDATES}}}",
        f"execution.micro_batch_size={2 * PER_UPDATE}",
    ]
    context = prepare(load_config(ROOT / "configs/addition_sft.yaml", settings))
    StageRun(make_stage(context, "advantage", 1)).execute()
    stage = make_stage(context, "optimize", 1)
    begun = cpu()
    StageRun(stage).execute()
    seconds = cpu() - begun
    losses = [update["loss"] for update in context.store.require(context.policy_ref(1)).summary["updates"]]
    data = TrainingData(context, stage.modality, 1, stage.inputs())
    samples = data.samples(stage.host)
    reader, prompts = samples.reader, context.prompts_by_id
    found = {row["prompt"]: row for row in rows}
    # Each pair has two rows, one after the other.
    numbers = [int(number) for units in data.plan(samples) for number in units.rows[::2, 0]]
    order = [found[prompts[reader.prompt_ids[reader.prompt_rows[number]]].text] for number in numbers]
    return seconds, losses, context.base_folder, order


def theirs(base: Path, rows: Rows) -> tuple[float, list[float]]:
    """Train with TRL in this process."""
    import torch
    from datasets import Dataset
    from tokenizers.processors import TemplateProcessing
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        """Takes rows in their order."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PER_UPDATE,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=BETA,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    asked = [{**row, "prompt": f"<bos>{row['prompt']}"} for row in rows]
    trainer = InOrder(model=model, args=settings, train_dataset=Dataset.from_list(asked), processing_class=tokenizer)
    begun = time.process_time()
    trainer.train()
    seconds = time.process_time() - begun
    return seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def table(folder: Path) -> str:
    """Return both sides as Markdown."""
    seconds, losses, base, rows = ours(folder)
    (folder / "order.json").write_text(json.dumps(rows))
    command = [sys.executable, "-m", "tools.benchmarks.given", "--peer", str(base), str(folder / "order.json")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    peer_seconds, peer_losses = json.loads(printed.splitlines()[-1])
    gap = max(abs(a - b) for a, b in zip(losses, peer_losses, strict=True))
    shown = [0, UPDATES // 4, UPDATES // 2, UPDATES - 1]
    head = f"| {UPDATES} updates of {PER_UPDATE} pairs | CPU s | " + " | ".join(f"loss {n + 1}" for n in shown) + " |"
    lines = [head, "|---|--:|" + "--:|" * len(shown)]
    for name, spent, values in (("flowmill", seconds, losses), ("TRL", peer_seconds, peer_losses)):
        lines.append(f"| {name} | {spent:.2f} | " + " | ".join(f"{values[n]:.5f}" for n in shown) + " |")
    return (
        "\n".join(
            [*lines, "", f"Largest difference of a loss: {gap:.1e}; ratio of CPU seconds {seconds / peer_seconds:.2f}."]
        )
        + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        sys.stdout.write(json.dumps(theirs(Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))) + "\n")
    else:
        with tempfile.TemporaryDirectory(prefix="flowmill-given-") as made:
            sys.stdout.write(table(Path(made)))
