"""A tiny unified model that was never trained, and runs of it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.models.quickstart.unified import tiny_model, write
from flowmill.models.rewards.base import declare
from tests.support.language_models import two_epochs

#: A template of messages in parts, as published models have.
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}\"{{ c['text'] }}{% endif %}"
    '{% endfor %}{% endfor %}{% if add_generation_prompt %}"{% endif %}'
)


def write_unified_model(folder: Path, *, seed: int = 0) -> None:
    write(tiny_model(seed), folder)


def unified_data(folder: Path, **rollout: Any) -> dict[str, Any]:
    """Return a config of two epochs of images, with base model and prompts in a folder."""
    write_unified_model(folder / "unified")
    for name, numbers in (("train", range(10, 18)), ("heldout", range(20, 22))):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"prompt": "\\"{n}\\""}}\n' for n in numbers))
    size = {"height": 16, "width": 16, "guidance_scale": 3.0}
    model = {"policy": "janus", "path": str(folder / "unified"), **size}
    data = two_epochs(folder, "unified", model, tokens={"max_new": 16, "evaluate": "sampled"}, **rollout)
    return {**data, "rewards": [{"name": "tests.support.unified_models:dark"}]}


@declare(media="images")
def dark(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """Return the share of dark pixels."""
    return [float(np.mean(image < 128)) for image in media]


@declare(media="images")
def coin(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """Return 0 or 1 by a hash of prompt and image, which says nothing of either: a control."""
    return [
        float(zlib.crc32(prompt.encode() + image.tobytes()) & 1) for prompt, image in zip(prompts, media, strict=True)
    ]
