"""The model's files: a whole pipeline folder with the trained weights, or only LoRA files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.folders import files_below
from flowmill.models.library_loading import diffusers_class, read_json
from flowmill.models.policies.diffusion import DiffusionPolicy, SchedulerChoice
from flowmill.models.policies.pipeline_index import component_entry, in_folder, index_file, portable_index
from flowmill.tasks.inputs.base_model import license_files


def write_pipeline(policy: DiffusionPolicy, base: Path, target: Path) -> None:
    """Write the components that the base's index names, with the current denoisers.

    Other files of the base are not copied: its card and its single-file checkpoints describe other weights.
    """
    target.mkdir(parents=True)
    path = index_file(base)
    index = portable_index(read_json(path), in_folder(base))
    for name, entry in index.items():
        listed = isinstance(entry, list) and entry[0] is not None
        if listed and (base / name).is_dir() and name not in policy.denoisers:
            _copy(base / name, target / name)
    # The base's index may name another pipeline with the same components.
    index["_class_name"] = policy.pipeline_name or index["_class_name"]
    _write(index, target / path.name)
    for name, module in policy.denoisers.items():
        module.save_pretrained(target / name)
        # diffusers writes the path it loaded from into the config; the base's config has none.
        shutil.copy(base / name / "config.json", target / name / "config.json")
    policy.complete(target)
    _forget_paths(target)
    copy_licenses(base, target)


def _copy(component: Path, target: Path) -> None:
    for name in files_below(component):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(component / name, target / name)


def store_scheduler(choice: SchedulerChoice, target: Path) -> None:
    """Set the scheduler of an exported pipeline."""
    make_scheduler(choice, target / "scheduler").save_pretrained(target / "scheduler")
    _list(target, "scheduler", choice.name)


def store_guider(options: Mapping[str, float], target: Path) -> None:
    """Set the guider of an exported pipeline to classifier-free guidance with these options."""
    diffusers_class("ClassifierFreeGuidance")(**options).save_pretrained(target / "guider")
    _list(target, "guider", "ClassifierFreeGuidance")


def make_scheduler(choice: SchedulerChoice, own: Path) -> Any:
    """Return the chosen scheduler; ``own`` is the folder of the pipeline's scheduler."""
    kind = diffusers_class(choice.name)
    if not choice.from_config:
        return kind(**choice.options)
    return kind.from_config(read_json(own / "scheduler_config.json"), **choice.options)


def copy_licenses(base: Path, target: Path) -> None:
    """Copy the base model's license files."""
    for path in license_files(base):
        shutil.copy(path, target / path.name)


def _list(target: Path, name: str, class_name: str) -> None:
    path = index_file(target)
    _write({**read_json(path), name: component_entry(path.name, name, "diffusers", class_name)}, path)


def _write(index: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _forget_paths(folder: Path) -> None:
    """Remove the absolute source paths that libraries write into configs of loaded components."""
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and Path(str(data.get("_name_or_path", ""))).is_absolute():
            del data["_name_or_path"]
            path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
