"""Renders every setting and option from the schema and the components' classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flowmill.configs.base import Section
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import CHAIN_ENGINES, ENGINES
from flowmill.models.maths import KERNELS, PLANS
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import BACKBONES, REWARDS
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.execution.launchers import LAUNCHERS
from flowmill.tasks.execution.runners import RUNNERS

#: Settings that name a component, and its table.
COMPONENTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "Model families": ("model.policy; options: model.options", POLICIES),
    "Base models built on the spot": ("model.build", BUILDERS),
    "Samplers of prompts": ("prompts.sampler", SAMPLERS),
    "Samplers": ("rollout.sampler", KERNELS),
    "Plans": ("rollout.plan", PLANS),
    "Algorithms": ("optimize.algorithm", ALGORITHMS),
    "Algorithms of language models": ("optimize.algorithm", TOKEN_ALGORITHMS),
    "Engines of image models": ("rollout.engine", CHAIN_ENGINES),
    "Engines of language models": ("rollout.tokens.engine", ENGINES),
    "Estimators of advantages": ("advantage.estimator", ESTIMATORS),
    "Rewards": ("rewards", REWARDS),
    "Backbones of fitted rewards": ("backbone, of flowmill reward fit", BACKBONES),
    "Runners": ("execution.runner", RUNNERS),
    "Launchers": ("execution.launcher", LAUNCHERS),
}


def render() -> str:
    """Return a section for each section of a config, and for each table of components."""
    lines: list[str] = []
    for section, field in RunConfig.model_fields.items():
        lines += [f"## {section}", "", _text(docstrings(RunConfig)[section]), ""]
        lines += ["| setting | type | default | |", "|---|---|---|---|"]
        model = _model(field.annotation)
        assert model is not None
        many = typing.get_origin(field.annotation) is tuple
        lines += [*_rows(f"{section}[]" if many else section, model), ""]
    lines += ["# Components", "", "Named by `name`; the tables list their `options`.", ""]
    for title, (setting, table) in COMPONENTS.items():
        lines += [
            f"## {title}",
            "",
            f"`{setting}`",
            "",
            "| name | option | type | default | |",
            "|---|---|---|---|---|",
        ]
        components = {name: resolve(table, name, label=setting) for name in sorted(table)}
        modules = Counter(kind.__module__ for kind in components.values())
        for name, kind in components.items():
            lines += _component(name, kind, alone=modules[kind.__module__] == 1)
        lines.append("")
    return "\n".join(lines)


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    said = docstrings(model)
    for name, field in model.model_fields.items():
        inner = _model(field.annotation)
        if inner is not None and inner.__name__ != "Component":
            many = typing.get_origin(field.annotation) in (tuple, list)
            default = _default(field) if _default(field) in ("none", "empty", "required") else "as below"
            yield f"| `{prefix}.{name}` | section | {default} | {_text(said[name])} |"
            yield from _rows(f"{prefix}.{name}{'[]' if many else ''}", inner)
            continue
        yield f"| `{prefix}.{name}` | {_type(field)} | {_default(field)} | {_text(said[name])} |"


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the section an annotation stands for, through tuples and None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in typing.get_args(annotation) if (model := _model(part)) is not None), None)


def _type(field: FieldInfo) -> str:
    limits = []
    for limit in field.metadata:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        limits += [f"{sign} {getattr(limit, name):g}" for name, sign in signs.items() if hasattr(limit, name)]
    return ", ".join([_name(field.annotation), *limits])


def _name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "none"
    if origin is typing.Literal:
        return " or ".join(str(part) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(part) for part in parts if part is not type(None))
    if origin is typing.Annotated:
        return _name(parts[0])
    if origin in (tuple, list):
        return f"list of {_name(parts[0])}"
    if origin is dict or origin is Mapping:
        return "mapping"
    plain = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Component": "component"}
    named = getattr(annotation, "__name__", str(annotation))
    return plain.get(named, named)


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _value(field.get_default(call_default_factory=True))


def _value(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, BaseModel):
        options = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{options.get('name', '')}`" if set(options) == {"name"} else _value(options)
    if value in ((), [], {}, ""):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value if isinstance(value, str) else json.dumps(value, default=str)}`"


def _component(name: str, kind: Any, *, alone: bool) -> Iterator[str]:
    options = kind.options_type if hasattr(kind, "options_type") else kind
    # The head of an algorithm's file describes it, if the file has no other algorithm.
    described = (
        sys.modules[kind.__module__] if alone and kind.__module__.startswith("flowmill.tasks.algorithms") else kind
    )
    text = _text(inspect.getdoc(described))
    yield f"| **`{name}`** | | | | {text} |"
    if not dataclasses.is_dataclass(options):
        return
    said = docstrings(options)
    # Annotations with torch's types do not import torch.
    hints = typing.get_type_hints(options, localns={"Tensor": torch.Tensor, "nn": torch.nn})
    for field in dataclasses.fields(options):
        if field.init and not field.name.startswith("_"):
            default_value = field.default_factory() if callable(field.default_factory) else field.default
            default = "required" if default_value is dataclasses.MISSING else _value(default_value)
            row = f"| | `{field.name}` | {_name(hints[field.name])} | {default} | {_text(said.get(field.name, ''))} |"
            yield row


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass or section, and of those it comes from."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not (dataclasses.is_dataclass(base) or issubclass(base, Section)):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = str(ast.literal_eval(text.value))
    return texts


def _text(text: str | None) -> str:
    return re.sub(r"\s+", " ", (text or "").replace("``", "`").replace("|", "\\|")).strip()
