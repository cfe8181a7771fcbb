"""Each place in the code that refuses a setting or a folder is one that ``check`` calls, or has a reason to be none.

Names are followed from ``check_config`` through imports; an attribute is followed where one module alone defines it, or
where it is one of the methods in ``FOLLOWED``, which each family has its own of. A refusal that only loading a model
reaches fails the test: check it by configs and headers, or say in ``UNREACHED`` why that cannot be.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.conftest import ROOT

#: Where models, their files and settings are refused.
ROOMS = (
    "models/engines",
    "models/policies",
    "models/weights",
    "tasks/runtime",
    "tasks/inputs",
    "tasks/modalities",
    "tasks/training",
    "tasks/stages",
)
#: Methods of families, adapters and prompts, which ``check`` calls by these names.
FOLLOWED = (
    "trained_on_meta",
    "read_adapter",
    "weights",
    "settings_for",
    "requires",
    "unit_of",
    "missing_parts",
    "longest",
)
_FILES = "reads every image or clip of the prompts"
_TOKENS = "reads every prompt with the model's processor"
#: What ``check`` does not reach, and why.
UNREACHED = {
    "models/policies/language_classes.py:check_installed": "needs packages and devices of the machine that samples",
    "tasks/stages/choose.py:run": "a sampler of one's own has to choose first",
    "tasks/modalities/diffusion/modality.py:encode": "check_marks refuses the prompts of a local folder",
    "tasks/stages/policy.py:_started": "compares commits of a hub id once it is downloaded",
    "models/policies/base.py:load_critic": "a family without critics; check refuses the algorithm",
    "models/policies/diffusion.py:decode_smoothly": "tasks/modalities/diffusion/setting_rules.py refuses it",
    "models/policies/clips.py:decode_smoothly": "tasks/modalities/diffusion/setting_rules.py refuses it",
    "models/policies/diffusion.py:encode_media": "a family of one's own, whose autoencoder has no encoder",
    "models/policies/diffusion.py:sound_form": "a family of one's own, whose autoencoder of sound has no encoder",
    "tasks/modalities/modality.py:read_given": "a kind of one's own, whose samples cannot be given",
    "models/policies/ltx2.py:__init__": "tasks/inputs/model_settings.py refuses it",
    "models/policies/wan_v2v.py:_whole": "no strength from 0 to 1 leaves out a number of steps",
    "models/policies/qwen_image.py:masked_text": _TOKENS,
    "models/policies/qwen_image21.py:encode_one": _TOKENS,
    "models/policies/reference_images.py:check_references": _FILES,
    "models/policies/reference_images.py:check_shape": _FILES,
    "models/policies/wan_v2v.py:_frames": _FILES,
    "models/weights/stored_weights.py:check_safetensors": "check_complete refuses components without safetensors",
    "tasks/inputs/weight_sources.py:single_file_identity": "reads every byte; check_single_files refuses others",
    "tasks/stages/gradient.py:take_slot": "a command names the stage, not a config",
    "tasks/stages/validate.py:take_slot": "a command names the stage, not a config",
    "tasks/modalities/modality.py:values": "check refuses the estimator",
}


@lru_cache(1)
def trees() -> dict[str, ast.Module]:
    files = (file for package in ("configs", "models", "storage", "tasks") for file in (ROOT / package).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield file, node


def lists() -> Iterator[tuple[str, str, ast.AST]]:
    """Yield the annotated constants of each file, such as its list of rules."""
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                yield file, node.target.id, node.value


def imported() -> dict[str, dict[str, tuple[str, str]]]:
    """Return what each file imports: name -> file and name there."""
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = Path(*node.module.removeprefix("flowmill.").split("."))
                path = module / "__init__.py" if (ROOT / module).is_dir() else module.with_suffix(".py")
                for each in node.names:
                    found[file][each.asname or each.name] = (str(path), each.name)
    return found


def reached() -> set[tuple[str, str]]:
    bodies: dict[tuple[str, str], list[ast.AST]] = defaultdict(list)
    where: dict[str, set[str]] = defaultdict(set)
    for file, node in functions():
        # Of a class only what makes one: its other methods are called by their names.
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("__")]
        bodies[file, node.name] += [node] if isinstance(node, ast.FunctionDef) else made
        where[node.name].add(file)
    for file, name, value in lists():
        bodies[file, name].append(value)
    imports, seen, todo = imported(), set(), [("tasks/checks/check.py", "check_config")]
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        file = place[0]
        for body in bodies.get(place, []):
            # What a class is made with counts by its own name, too.
            todo += [(file, body.name)] if isinstance(body, ast.FunctionDef) else []
            for node in ast.walk(body):
                if isinstance(node, ast.Name):
                    todo.append(imports[file].get(node.id, (file, node.id)))
                elif isinstance(node, ast.Attribute):
                    one = len(where[node.attr]) == 1 or node.attr in FOLLOWED or "check" in node.attr
                    todo += [(each, node.attr) for each in where[node.attr] if one or each == file]
    return seen


def refuses(node: ast.AST) -> bool:
    raised = (
        each.exc.func for each in ast.walk(node) if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)
    )
    return any(isinstance(each, ast.Name) and each.id in ("ConfigError", "unfit") for each in raised)


def test_each_refusal_is_reached_by_check() -> None:
    found = {
        (file, node.name)
        for file, node in functions()
        if isinstance(node, ast.FunctionDef) and file.startswith(ROOMS) and refuses(node)
    }
    assert len(found) > 100
    assert {f"{file}:{name}" for file, name in found - reached()} == UNREACHED.keys()
