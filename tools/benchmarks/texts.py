"""GRPO on texts compared with its bare compute and with TRL, in CPU seconds of one thread.

``python -m tools.benchmarks.texts [--rounds N]`` prints one table. TRL is no dependency: install it with ``pip install
--no-deps --target FOLDER trl`` and set ``PYTHONPATH=FOLDER``, else its row is missing. All sample and train the same
number of texts of the same width with one model of random weights. The bare compute is a written loop with a cache, or
transformers' ``generate`` with a static one, a forward and a backward of whole texts with AdamW, and the forwards of
the texts that flowmill measures KLs on; nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from flowmill.models.quickstart.characters import BOS, EOS, PAD, Characters
from flowmill.models.rewards.base import Metadata, declare
from flowmill.tasks.training.policy_moves import estimate_rows
from tools.benchmarks.peers import take

#: Characters of a prompt and of a completion, texts per epoch, updates, texts per forward.
PROMPT, NEW, PROMPTS, GROUP, UPDATES, BATCH = 31, 48, 32, 8, 2, 64
RATE = 1e-4
_TEXTS = PROMPTS * GROUP
#: One token each. There are so many that hardly a text of random weights ends early.
_LETTERS = 2045
_CHARACTERS = Characters("".join(map(chr, range(0x4E00, 0x4E00 + _LETTERS))))
#: One epoch warms up, the second is measured.
_EPOCHS = 2
_OWN, _SHARED, _LOOP, _GENERATE, _TRL = "flowmill", "flowmill, shared prompts", "bare: a loop", "bare: generate", "TRL"


@declare(media="texts")
def low_characters(media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> list[float]:
    """Reward: the share of characters from the first half of the vocabulary."""
    return [_low(text) for text in media]


def _low(text: str) -> float:
    return sum(character < _CHARACTERS.characters[_LETTERS // 2] for character in text) / NEW


def build(folder: Path) -> None:
    """Write the model, of 5.8 million parameters, with its tokenizer, and the prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokens = {"vocab_size": 2048, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=128, tie_word_embeddings=False))
    model.save_pretrained(folder / "model")
    _CHARACTERS.tokenizer().save_pretrained(folder / "model")
    drawn = random.Random(0)
    prompts = ["".join(drawn.choices(_CHARACTERS.characters, k=PROMPT)) for _ in range(PROMPTS * _EPOCHS)]
    (folder / "prompts.txt").write_text("\n".join(prompts))


def config(base: Path, folder: Path, *, shared: bool) -> dict[str, Any]:
    """Return flowmill's config of the work."""
    return {
        "run": {"epochs": _EPOCHS},
        "store": {"root": str(folder / "store")},
        "model": {"policy": "causal_lm", "path": str(base / "model")},
        "prompts": {"train": str(base / "prompts.txt")},
        "rollout": {
            "prompts_per_epoch": PROMPTS,
            "group_size": GROUP,
            "groups_per_shard": PROMPTS,
            "tokens": {"max_new": NEW, "rescore": False},
        },
        "rewards": [{"name": "tools.benchmarks.texts:low_characters"}],
        "optimize": {"learning_rate": RATE, "updates_per_epoch": UPDATES, "shared_prompts": shared},
        "evaluate": {"every": 10**6, "samples": 1},
        "execution": {"rollout_batch_size": BATCH, "micro_batch_size": BATCH, "threads": 1},
    }


def own(base: Path, *, shared: bool) -> dict[str, float]:
    """Return the CPU seconds of flowmill's second epoch: of its stages alone, and of all of ``flowmill run``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, counts = folder / "texts.yaml", folder / "epochs.json"
        path.write_text(yaml.safe_dump(config(base, folder, shared=shared)))
        take(["-m", "tools.benchmarks.ours", str(counts), "run", str(path), "--quiet"], folder)
        # In the same store every artifact would be there already.
        shutil.rmtree(folder / "store")
        output, _ = take(["-m", "tools.benchmarks.texts", "--role", "stages", str(path)], folder)
        return {**json.loads(output.splitlines()[-1]), "epoch": json.loads(counts.read_text())[-1]["cpu"]}


def stages(path: Path) -> dict[str, float]:
    """Carry out the stages of a config; return the CPU seconds of sampling and of training in the second epoch."""
    from flowmill.configs.load import load_config
    from tests.support.inside import cpu, prepare, run_stage

    torch.set_num_threads(1)
    context = prepare(load_config(path))
    spent: dict[str, float] = {}
    for epoch in range(1, _EPOCHS + 1):
        for node in (*context.plan.scored(epoch), *context.plan.training(epoch)):
            before = cpu()
            run_stage(context, node.stage, epoch, node.slot)
            spent[node.stage] = cpu() - before
    return {"sample": spent["rollout"], "train": spent["optimize"]}


class Bare:
    """The model, and its rows of the work."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(base / "model")
        ids = torch.tensor(tokenizer((base / "prompts.txt").read_text().splitlines()[:PROMPTS]).input_ids)
        self.prompts = torch.split(ids.repeat_interleave(GROUP, 0), BATCH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    @torch.no_grad()
    def loop(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return whole texts, drawn by a loop with a cache that reads all rows of a prompt."""
        ids, cache, drawn = prompts, None, [prompts]
        for _ in range(NEW):
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].softmax(-1).multinomial(1), out.past_key_values
            drawn.append(ids)
        return torch.cat(drawn, 1)

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return whole texts of transformers' ``generate``."""
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "min_new_tokens": NEW}
        mask = torch.ones_like(prompts)
        texts: torch.Tensor = self.model.generate(
            prompts, attention_mask=mask, cache_implementation="static", disable_compile=True, **options
        )
        return texts

    def train(self, texts: Sequence[torch.Tensor]) -> None:
        """Update the weights, by as many batches in each update."""
        for number, batch in enumerate(texts, 1):
            logits = self.model(batch, use_cache=False, logits_to_keep=NEW + 1).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, batch[:, -NEW:, None])
            (log_probs.mean() / (len(texts) // UPDATES)).backward()
            if number % (len(texts) // UPDATES) == 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def measure(self, texts: Sequence[torch.Tensor]) -> None:
        """Compute the rows that measure the KLs to the previous policy and to the base model."""
        batch = torch.cat(list(texts))[: estimate_rows(_TEXTS)]
        for _ in range(2):
            self.model(batch, use_cache=False, logits_to_keep=NEW + 1)

    def epoch(self, sample: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the CPU seconds of sampling and training."""
        begun = time.process_time()
        texts = [sample(prompts) for prompts in self.prompts]
        sampled = time.process_time()
        self.train(texts)
        self.measure(texts)
        ended = time.process_time()
        return {"sample": sampled - begun, "train": ended - sampled, "epoch": ended - begun}


def bare(base: Path, sampler: str) -> dict[str, float]:
    """Return the CPU seconds of the second epoch of the bare compute."""
    work = Bare(base)
    return [work.epoch(getattr(work, sampler)) for _ in range(_EPOCHS)][-1]


def trl(base: Path) -> dict[str, float]:
    """Return the CPU seconds of the second epoch of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            learning_rate=RATE,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=_TEXTS // UPDATES // BATCH,
            steps_per_generation=_TEXTS // BATCH,
            num_generations=GROUP,
            max_completion_length=NEW,
            top_k=0,
            beta=0.0,
            max_steps=UPDATES * _EPOCHS,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32),
            reward_funcs=lambda completions, **_: [_low(text) for text in completions],
            args=settings,
            train_dataset=Dataset.from_list(
                [{"prompt": row} for row in (base / "prompts.txt").read_text().split("\n")]
            ),
            processing_class=AutoTokenizer.from_pretrained(base / "model"),
            callbacks=[Ends()],
        ).train()
    return {"epoch": ends[-1] - ends[UPDATES - 1]}


def table(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return the least of each figure as Markdown, and the median ratio of a round to the loop."""
    lines = [
        "| | sampled tokens per CPU s | CPU s of training | CPU s of an epoch | over the loop's |",
        "|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        least = {figure: min(each[name][figure] for each in rounds) for figure in rounds[0][name]}
        sampled = f"{_TEXTS * NEW / least['sample']:,.0f}" if "sample" in least else ""
        trained = f"{least['train']:.2f}" if "train" in least else ""
        ratio = statistics.median(each[name]["epoch"] / each[_LOOP]["epoch"] for each in rounds)
        lines.append(f"| {name} | {sampled} | {trained} | {least['epoch']:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def compare(rounds: int) -> str:
    """Return the table."""
    measured = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        build(base)
        roles = {_LOOP: "loop", _GENERATE: "generate"}
        if importlib.util.find_spec("trl") is not None:
            roles[_TRL] = "trl"
        for _ in range(rounds):
            each = {_OWN: own(base, shared=False), _SHARED: own(base, shared=True)}
            for row, role in roles.items():
                output, _ = take(["-m", "tools.benchmarks.texts", "--role", role, str(base)], base)
                each[row] = json.loads(output.splitlines()[-1])
            measured.append(each)
            sys.stderr.write(f"{json.dumps(each)}\n")
    return table(measured)


def main() -> None:
    """Compare, or be one of the compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=("stages", "loop", "generate", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is None:
        sys.stdout.write(compare(options.rounds))
        return
    roles = {"stages": stages, "trl": trl}
    done = roles[options.role](options.path) if options.role in roles else bare(options.path, options.role)
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
