"""The data behind a trained policy, for cards and reports: samples of data, held-out rows, and fitted rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import in_code, in_markdown
from flowmill.configs.rewards import RewardSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.backends.checksums import hash_file
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.algorithms.resampling import FEWEST
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import HELD_OUT

#: Units of an accuracy that say nothing on samples of one prompt.
ANY_PROMPTS = "pairs of different prompts"
_MODELS = "reward_models"


def fitted_rewards(context: RunContext) -> Iterator[tuple[RewardSection, Path, dict[str, Any]]]:
    """Yield each fitted reward, monitor or judge with its description and the file of that, if it is here."""
    for section in reward_sections(context.config):
        if section.name != "fitted":
            continue
        # It imports torch, and reports of other runs need none.
        from flowmill.models.rewards.fitted import ABOUT

        try:
            fitted = context.contents.fits.located(section)
        except ConfigError:
            continue
        file = Path(str(fitted.options.get("path", ""))) / ABOUT
        description = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        # One that no fit wrote has weights and a backbone alone.
        if "heldout" in description:
            yield section, file, description


def accuracy_text(fit: Mapping[str, Any]) -> str:
    """Return the accuracy with its interval as a sentence."""
    accuracy = fit["heldout"]["accuracy"]
    interval = few = ""
    if accuracy["low"] is not None:
        interval = f" (95 %: {accuracy['low']:.3f} to {accuracy['high']:.3f})"
    elif accuracy["unit"] != ANY_PROMPTS:
        few = f", of which an interval needs {FEWEST}"
    return f"held-out accuracy {accuracy['mean']:.3f}{interval} over {accuracy['count']} {accuracy['unit']}{few}"


def backbone_text(description: Mapping[str, Any]) -> str:
    """Return the backbone of a fitted reward, with the rank of its adapters if it has some."""
    name = str(description["backbone"]["name"])
    return f"{name}, LoRA of rank {description['lora']['rank']}" if "lora" in description else name


def data_section(context: RunContext, epoch: int) -> str:
    """Return the section of a card on the data of a policy after an epoch, in Markdown; empty without such data."""
    lines = [*_data_lines(context, epoch), *(_fitted(context, *each) for each in fitted_rewards(context))]
    return "\n".join(["## Data", "", *(f"- {line}" for line in lines)]) if lines else ""


def _data_lines(context: RunContext, epoch: int) -> Iterator[str]:
    chain, data = context.chain, RunView(context).ingested()
    if data is None:
        return
    named = in_code(chain.require(*chain.plan.samples_of(0)).artifact)
    yield (
        f"Given samples: {in_markdown(data.published)}, {data.samples} samples of {data.prompts} prompts "
        f"({in_markdown(data.license_text)}), {named}"
    )
    if chain.plan.has_losses:
        apart = chain.require(0, "ingest", HELD_OUT).ref
        validations = {each: chain.find(each, "validate") for each in (0, epoch)}
        loss = [f"{context.store.require(entry.ref).summary['loss']:.4g}" for entry in validations.values() if entry]
        yield (
            f"Held-out rows: {context.store.require(apart).summary['samples']} samples, {in_code(str(apart))}, loss "
            f"{' -> '.join(loss) or 'not computed'}"
        )


def _fitted(context: RunContext, section: RewardSection, file: Path, description: Mapping[str, Any]) -> str:
    data, raters, ref = description["data"], description["heldout"]["raters"].values(), _artifact(context.store, file)
    figure = "error" if "error" in description["heldout"] else "agreement"
    # Names of people are for the card of the reward alone.
    people = [f"{figure} {each[figure]:.3f} in {each['judgments']}" for each in raters]
    refs = [] if ref is None else [str(ref), *context.store.require(ref).inputs]
    named = "".join(f"{link}{in_code(each)}" for link, each in zip(("; ", *[" from "] * len(refs)), refs, strict=False))
    sources = [f"{name} {count}" for name, count in data["sources"].items()]
    text = (
        f"{backbone_text(description)}, fitted on {data['train']} {data['kind']} of {data['prompts']} prompts "
        f"({data['media']} {data['judged']}); {accuracy_text(description)}; {len(people)} raters, held-out "
        f"{', '.join(people)}; judgments: {', '.join(sources)}"
    )
    # The description may be written by another user.
    return f"Reward {in_code(section.slot)}: {in_markdown(text)}{named}"


def _artifact(store: ArtifactStore, file: Path) -> ArtifactRef | None:
    """Return the artifact in a store that a description is of, or a copy of; None: it is in another store."""
    digest = hash_file(file)
    for name in store.root.list(_MODELS):
        ref = ArtifactRef(_MODELS, name)
        if any((each.name, each.xxh3) == (file.name, digest) for record in store.records(ref) for each in record.files):
            return ref if store.manifest(ref) is not None else None
    return None
