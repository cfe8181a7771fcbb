"""Base models and adapters that were distilled to few steps, by their published name or a folder's config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flowmill.configs.model_families import spec_of
from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import read_json

#: Words of published names: FLUX.1-schnell, SDXL-Turbo, Qwen-Image-Lightning, Hyper-SD, LCM, Sana Sprint, DMD2,
#: StepDistill and 4-step adapters, LTX-2's distilled models.
_WORD = re.compile(
    r"(?<![a-z])(schnell|turbo|lightning|hyper|lcm|sprint|dmd2?|causvid|\d+[-_ ]?steps?)(?![a-z])"
    r"|(step[-_]?distill(?:ed)?)|ltx[^/]*(distilled)",
    re.IGNORECASE,
)
#: Published models whose names do not say it.
_NAMES = frozenset(f"black-forest-labs/{name}" for name in ("FLUX.2-klein-4B", "FLUX.2-klein-9B"))
#: Fields of a folder's files, and the value that distillation to few steps sets.
_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("model_index.json", "is_distilled", True),
    ("scheduler/scheduler_config.json", "_class_name", "LCMScheduler"),
)


def few_step_sign(family: str, path: str) -> str | None:
    """Return the sign that a base model or an adapter was distilled to few steps, as a clause; None if there is none.

    Args:
        family: name of the model family; models of families with embedded guidance that lack its input are distilled.
        path: hub id, folder or file.
    """
    if path in _NAMES:
        return "its publisher says so"
    if (word := _WORD.search(Path(path).name)) is not None:
        return f"its name has '{next(filter(None, word.groups()))}'"
    folder, fields = user_path(path), _FIELDS
    if spec_of(family).guidance == "input":
        fields = (*fields, ("transformer/config.json", "guidance_embeds", False))
    for file, name, value in fields:
        if (folder / file).is_file() and read_json(folder / file).get(name) == value:
            return f"{name} is {value} in {file}"
    return None
