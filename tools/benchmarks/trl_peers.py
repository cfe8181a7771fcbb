"""TRL's GRPOTrainer and PPOTrainer on a preset of sums: the same base model, prompts, reward, batches and updates.

``python -m tools.benchmarks.trl_peers CONFIG BASE --seed N --every K`` prints a JSON list of (rounds, CPU seconds so
far without evaluations, greedy exact match of the held-out prompts). TRL 1.12 is the last version with a PPOTrainer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig

Rows = list[dict[str, Any]]
Curve = list[tuple[int, float, float]]

_EOS, _PAD = 2, 0


class Task:
    """The base model, prompts and reward of a preset, as TRL takes them."""

    def __init__(self, config: RunConfig, base: Path, seed: int) -> None:
        from tokenizers.processors import TemplateProcessing
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.config, self.seed, self.base = config, seed, base
        self.tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        # TRL is given text with the token that texts begin with.
        self.tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model.generation_config.eos_token_id, self.model.generation_config.pad_token_id = _EOS, _PAD
        order, train = random.Random(seed), _read(config.prompts.train)
        self.rows = [
            row for _ in range(config.run.epochs) for row in order.sample(train, config.rollout.prompts_per_epoch)
        ]
        self.heldout = _read(config.prompts.heldout)

    def exact(self, ids: list[int], answer: str) -> float:
        """Return 1 for exactly the answer and the end token."""
        return float(ids[-1] == _EOS and self.tokenizer.decode(ids[:-1]) == answer)

    def accuracy(self, model: Any) -> float:
        """Return the greedy exact match of the held-out prompts."""
        asked = self.tokenizer([f"<bos>{row['prompt']}" for row in self.heldout], return_tensors="pt", padding=True)
        was, _ = model.training, model.eval()
        made = model.generate(**asked, do_sample=False, max_new_tokens=5)[:, asked.input_ids.shape[1] :].tolist()
        model.train(was)
        ended = [ids[: ids.index(_EOS) + 1] if _EOS in ids else ids for ids in made]
        return sum(self.exact(ids, row["answer"]) for ids, row in zip(ended, self.heldout, strict=True)) / len(made)

    def settings(self) -> dict[str, Any]:
        """Return the settings that both trainers share."""
        optimize = self.config.optimize
        assert optimize.schedule is not None
        return {
            "output_dir": tempfile.mkdtemp(),
            "learning_rate": optimize.learning_rate,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"lr_end": optimize.learning_rate * optimize.schedule.final, "power": 1.0},
            "max_grad_norm": optimize.max_grad_norm,
            "weight_decay": optimize.weight_decay,
            "save_strategy": "no",
            "logging_steps": 10**6,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "seed": self.seed,
            "disable_tqdm": True,
        }

    def curve(self, every: int, steps: int, policy: Callable[[], Any]) -> tuple[Any, Curve]:
        """Return a callback that evaluates after every ``every`` rounds of ``steps`` steps, and its growing result."""
        from transformers import TrainerCallback

        task, found = self, [(0, 0.0, self.accuracy(self.model))]

        class Evaluate(TrainerCallback):  # type: ignore[misc]
            begun = 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.begun = time.process_time()

            def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
                if state.global_step % (every * steps):
                    return
                now = time.process_time()
                found.append((state.global_step // steps, now - self.begun, task.accuracy(policy())))
                self.begun += time.process_time() - now

        return Evaluate(), found


def grpo(task: Task, every: int) -> Curve:
    """Train with TRL's GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = task.config
    rollout, updates = config.rollout, config.optimize.updates_per_epoch

    def right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [task.exact(ids, text) for ids, text in zip(completion_ids, answer, strict=True)]

    callback, found = task.curve(every, updates, lambda: task.model)
    settings = GRPOConfig(
        **task.settings(),
        per_device_train_batch_size=rollout.prompts_per_epoch * rollout.group_size // updates,
        steps_per_generation=updates,
        num_generations=rollout.group_size,
        beta=0.0,
        loss_type="bnpo",
        max_completion_length=5,
        top_k=0,
        max_steps=config.run.epochs * updates,
        shuffle_dataset=False,
    )
    data = Dataset.from_list([{"prompt": f"<bos>{row['prompt']}", "answer": row["answer"]} for row in task.rows])
    GRPOTrainer(
        model=task.model,
        reward_funcs=right,
        args=settings,
        train_dataset=data,
        processing_class=task.tokenizer,
        callbacks=[callback],
    ).train()
    return found


class _Ids(nn.Module):
    """The body of a reward model whose hidden states are the token ids."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=[torch.where(attention_mask.bool(), input_ids, _PAD).float()[..., None]])


class _Exact(nn.Module):
    """The reward of the preset as the reward model that TRL asks for."""

    base_model_prefix = "body"

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.body, self._task = _Ids(), task
        self._answers = {row["prompt"]: row["answer"] for row in task.rows}

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (B, T, 1) scores: the same for each position of a text."""
        return torch.stack([torch.full_like(row, self._one(row[:, 0].long().tolist())) for row in hidden])

    def _one(self, ids: list[int]) -> float:
        ids = [each for each in ids if each != _PAD]
        end = next((at for at, each in enumerate(ids) if self._task.tokenizer.decode([each]) == "="), len(ids) - 1)
        asked = self._task.tokenizer.decode(ids[: end + 1], skip_special_tokens=True)
        answer = self._answers.get(asked)
        return 0.0 if answer is None or ids[end + 1 :] == [] else self._task.exact(ids[end + 1 :], answer)


def ppo(task: Task, every: int) -> Curve:
    """Train with TRL's PPOTrainer; actor and critic share one optimizer there, and no epoch trains the critic alone."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config = task.config
    rollout, optimize = config.rollout, config.optimize
    assert rollout.tokens is not None
    batch = rollout.prompts_per_epoch * rollout.group_size
    critic = AutoModelForSequenceClassification.from_pretrained(task.base, num_labels=1, dtype=torch.float32)
    nn.init.zeros_(critic.score.weight)
    callback, found = task.curve(every, 1, lambda: trainer.accelerator.unwrap_model(trainer.model).policy)
    estimator = config.advantage.estimator.options
    settings = PPOConfig(
        **task.settings(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_mini_batches=optimize.updates_per_epoch,
        num_ppo_epochs=1,
        total_episodes=config.run.epochs * batch,
        response_length=5,
        stop_token="eos",
        temperature=rollout.tokens.temperature,
        kl_coef=estimator["kl_coef"],
        gamma=estimator["discount"],
        lam=estimator["decay"],
        vf_coef=0.5,
        local_rollout_forward_batch_size=batch,
        num_sample_generations=0,
        missing_eos_penalty=None,
    )
    asked = [task.tokenizer(f"<bos>{row['prompt']}").input_ids for row in task.rows for _ in range(rollout.group_size)]
    data = Dataset.from_list([{"input_ids": ids} for ids in asked])
    trainer = PPOTrainer(
        args=settings,
        processing_class=task.tokenizer,
        model=task.model,
        ref_model=AutoModelForCausalLM.from_pretrained(task.base, dtype=torch.float32),
        reward_model=_Exact(task),
        value_model=critic,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        callbacks=[callback],
    )
    trainer.train()
    return found


def _read(path: Any) -> Rows:
    return [json.loads(line) for line in Path(str(path)).read_text().splitlines()]


def main() -> None:
    """Train one seed and print its curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("base", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Task(load_config(options.config, [f"run.epochs={options.epochs}"]), options.base, options.seed)
    train = ppo if task.config.optimize.algorithm.name == "ppo" else grpo
    sys.stdout.write(json.dumps(train(task, options.every)) + "\n")


if __name__ == "__main__":
    main()
