"""The small run that most tests make: 4 groups of 4, 3 steps, two epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.store_trust import remember


def small_data(folder: Path, base: Path) -> dict[str, Any]:
    """Return its config, with prompts and store in a folder.

    Args:
        folder: of prompts and store.
        base: the tiny pipeline.
    """
    return {
        "run": {"name": "small", "epochs": 2},
        "store": {"root": str(folder / "store")},
        "model": {
            "policy": "sd3",
            "path": str(base),
            "height": 16,
            "width": 32,
            "options": {"max_sequence_length": 1, "schedule": "linear"},
        },
        "prompts": {"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt")},
        "rollout": {"prompts_per_epoch": 4, "group_size": 4, "steps": 3, "groups_per_shard": 2},
        "rewards": [{"name": "jpeg_compressibility"}],
        "optimize": {"learning_rate": 1e-3, "algorithm": {"name": "grpo", "options": {"clip_range": 0.002}}},
        "evaluate": {"every": 1, "samples": 4, "images": 4},
        "execution": {"rollout_batch_size": 16, "micro_batch_size": 16},
    }


def write_small(folder: Path, data: dict[str, Any]) -> Path:
    """Write the config and its prompts, and return the config's path."""
    (folder / "train.txt").write_text("".join(f'"{n:02d}"\n' for n in range(8)))
    (folder / "heldout.txt").write_text("".join(f'"{n:02d}"\n' for n in range(90, 93)))
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def small_config(folder: Path, base: Path, *overrides: str) -> RunConfig:
    """Return the small run with overrides, in a folder; it counts as given on this machine."""
    path = write_small(folder, small_data(folder, base))
    remember(load_config(path))
    return load_config(path, overrides)
