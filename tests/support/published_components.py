"""Folders of published pipelines without weights: their index, and the configs of what makes samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from flowmill.models.library_loading import read_json
from flowmill.models.memory.architectures import meta_decoder, meta_denoiser
from flowmill.models.memory.published import pipelines
from flowmill.models.policies.pipeline_index import component_entry, index_file
from flowmill.models.quickstart.tiny import build_tiny
from tests.conftest import ROOT


def published_folder(path: str, family: str, folder: Path) -> None:
    """Write the folder of a published model; what encodes texts is that of the family's tiny pipeline.

    Args:
        path: id on the hub.
        family: its ``model.policy``.
        folder: folder to write.
    """
    build_tiny(family).save_pretrained(folder)
    about, architecture = _components().get(path, {}), pipelines()[path]
    index = index_file(folder)
    named = {**read_json(index), **about.get("index", {})}
    if "scheduler" in about:
        made = about["scheduler"]["class"]
        named["scheduler"] = component_entry(index.name, "scheduler", "diffusers", made)
        _write(folder / "scheduler" / "scheduler_config.json", made, about["scheduler"])
    for name in ("transformer", "transformer_2", "unet"):
        if (folder / name).is_dir():
            _write(folder / name / "config.json", architecture.denoiser, dict(meta_denoiser(architecture).config))
    _write(folder / "vae" / "config.json", architecture.vae["class"], dict(meta_decoder(architecture).config))
    index.write_text(json.dumps(named))


def _components() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "published" / "components.yaml").read_text())
    return found


def _write(file: Path, made: str, config: Any) -> None:
    fields = {key: value for key, value in config.items() if key != "class" and not key.startswith("_")}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"_class_name": made, **fields}))
