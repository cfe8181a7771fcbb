"""A tiny language model that was never trained, as a run's base."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import yaml

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.quickstart.addition import character_tokenizer, tiny_model
from flowmill.models.rewards.base import declare


def write_language_model(folder: Path, *, seed: int = 0, tied: bool = False) -> None:
    model = tiny_model(seed)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def texts_data(folder: Path, **rollout: Any) -> dict[str, Any]:
    """Return a config of two epochs of sums, with base model and prompts in a folder."""
    write_language_model(folder / "lm")
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}' for a in range(1, 4) for b in range(8, 12)]
    (folder / "train.jsonl").write_text("\n".join(rows[:10]) + "\n")
    (folder / "heldout.jsonl").write_text("\n".join(rows[10:]) + "\n")
    return two_epochs(folder, "texts", {"policy": "causal_lm", "path": str(folder / "lm")}, **rollout)


def texts_config(folder: Path, *overrides: str, **rollout: Any) -> RunConfig:
    """Return the config of ``texts_data`` with overrides; its files are written once into a folder."""
    path = folder / "texts.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(texts_data(folder, **rollout)))
    return load_config(path, overrides)


def two_epochs(folder: Path, name: str, model: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    """Return a config of two epochs of texts, with the prompts in a folder."""
    return {
        "run": {"name": name, "epochs": 2},
        "store": {"root": str(folder / "store")},
        "model": model,
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
        "rollout": {
            "prompts_per_epoch": 4,
            "group_size": 4,
            "groups_per_shard": 2,
            "tokens": {"max_new": 4},
            **rollout,
        },
        "rewards": [{"name": "tests.support.language_models:digits_in"}],
        "optimize": {"learning_rate": 1e-3, "updates_per_epoch": 2},
        "evaluate": {"every": 1, "samples": 4, "images": 2},
        "execution": {"rollout_batch_size": 8, "micro_batch_size": 8},
    }


def drawn_texts_data(folder: Path, base: Path) -> dict[str, Any]:
    """Return a config of texts that a tiny image model draws, with a reward of the images.

    Args:
        folder: of the language model, prompts and store.
        base: the pipeline of the image model.
    """
    model = {
        "policy": "sd3",
        "path": str(base),
        "height": 16,
        "width": 32,
        "options": {"max_sequence_length": 1, "schedule": "linear"},
    }
    return {
        **texts_data(folder),
        "render": {"model": model, "steps": 2},
        "rewards": [{"name": "jpeg_compressibility"}],
        "monitors": [{"name": "tests.support.language_models:digits_in", "label": "digits", "reads": "texts"}],
    }


def digits_in(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """Return the share of digits in completions: a random model makes some, and can make more."""
    return [sum(each.isdigit() for each in text) / max(1, len(text)) for text in media]


@declare(media="texts")
def coin(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """Return 0 or 1 by a hash of prompt and text, which says nothing of either: a control."""
    return [float(zlib.crc32(f"{prompt}\0{text}".encode()) & 1) for prompt, text in zip(prompts, media, strict=True)]
