"""The card of a published dataset: README.md with the Hub's fields, contents, sources, licenses, judgments, lineage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.escaping import fenced, in_code, in_link, in_markdown
from configs.fingerprint import fingerprint
from configs.paths import portable
from storage.backends.checksums import hash_file
from tasks.export.card import plain_reward, yaml_head
from tasks.export.request import Part
from tasks.inputs.base_model import BaseModel, describe_base
from tasks.inputs.prompts import SOURCE, prompt_set
from tasks.metrics.tracked import paragraphs
from tasks.ratings.figures import rate_text, rating_report
from tasks.reports.published import FORMS, DataFile, rater_names
from tasks.runs.context import RunContext
from tasks.specs.graph import Node

_ABOUT = {
    "rollouts": "samples that training scored, with 'reward' (the optimized sum), 'advantage' and 'reward.<label>'",
    "given": "samples that training was given; 'reward' is their rating, or 1 and 0 of a pair",
    "evaluations": "samples of fixed seeds, with the score of each reward and judge; epoch 0 is before training",
    "preferences": "answers of people who compared two samples without knowing their origin",
}


def dataset_card(context: RunContext, repo: str, files: Sequence[DataFile], parts: Mapping[Part, Sequence[int]]) -> str:
    """Return README.md.

    Args:
        context: the run.
        repo: ``owner/name``.
        files: the files of the dataset.
        parts: epochs of each part.
    """
    base = _base(context)
    sections = [
        f"---\n{yaml_head(_front(context, base, files, parts))}---",
        f"# Samples of {in_markdown(context.run.name)}",
        f"The run {in_code(context.run.name)} {in_markdown(paragraphs(context, done=False)[0])} {_model(base)}",
        f"## Contents\n\n{_contents(files, parts)}",
        f"## Use\n\n{_use(repo, files)}",
        f"## Prompts and licenses\n\n{_sources(context, base, files)}",
    ]
    if "preferences" in parts:
        sections.append(f"## Preferences\n\n{_judged(context)}")
    sections.append(f"## Lineage\n\n{_table(('epoch', 'stage', 'artifact'), _lineage(context, parts))}")
    return "\n\n".join(sections) + "\n"


def _base(context: RunContext) -> BaseModel:
    section = context.config.model
    return describe_base(section, {} if section.path is None else context.model_identity, context.base_folder)


def _model(base: BaseModel) -> str:
    link = f"https://huggingface.co/{base.name}"
    named = in_link(base.name, link) if base.source == "hub" else in_code(base.name)
    if base.license.id == "unknown":
        return f"Its base model {named} states no license."
    return f"Its base model {named} has the license {in_code(base.license.id)}, which may also bind what it makes."


def _front(
    context: RunContext, base: BaseModel, files: Sequence[DataFile], parts: Mapping[Part, Sequence[int]]
) -> dict[str, Any]:
    config, stated = context.config, {name for file in files for name in file.licenses}
    kinds = {"text": "text-generation", "video": "text-to-video", "image": "text-to-image"}
    tasks = dict.fromkeys(kinds[file.content] for file in files if file.content in kinds)
    return {
        # One license of all rows is the dataset's.
        "license": next(iter(stated)) if len(stated) == 1 and stated != {""} else "unknown",
        **({"task_categories": [*tasks]} if tasks else {}),
        "tags": ["flowmill", config.optimize.algorithm.name, *parts],
        "configs": [
            {
                "config_name": part,
                **({"default": True} if number == 0 else {}),
                "data_files": [
                    {"split": split, "path": f"{part}/{split}-*{files[0].path.suffix}"}
                    for split in dict.fromkeys(file.split for file in files if file.part == part)
                ],
            }
            for number, part in enumerate(parts)
        ],
        "flowmill": {
            "run": context.run.name,
            "base_model": base.plain(),
            "algorithm": config.optimize.algorithm.name,
            "seed": config.run.seed,
            "rewards": [plain_reward(section) for section in config.rewards],
            "judges": [plain_reward(section) for section in config.evaluate.judges],
            "prompts": {"train": prompt_set(config.prompts, "train"), "heldout": prompt_set(config.prompts, "heldout")},
            "rows": {part: sum(file.rows for file in files if file.part == part) for part in parts},
            "content": fingerprint([[file.name, hash_file(file.path)] for file in files]),
        },
    }


def _contents(files: Sequence[DataFile], parts: Mapping[Part, Sequence[int]]) -> str:
    rows = []
    for part, epochs in parts.items():
        spans = "" if epochs == [0] and part != "evaluations" else ", ".join(map(str, epochs))
        for split in dict.fromkeys(file.split for file in files if file.part == part):
            count = sum(file.rows for file in files if (file.part, file.split) == (part, split))
            rows.append((part, split, spans, count, in_markdown(_ABOUT[part])))
    return _table(("configuration", "split", "epochs", "rows", "content"), rows)


def _use(repo: str, files: Sequence[DataFile]) -> str:
    first = files[0]
    code = (
        f'import datasets\n\n{first.part} = datasets.load_dataset("{repo}", "{first.part}", split="{first.split}")\n'
        f"print({first.part}[0])"
    )
    notes = []
    if first.name.endswith(FORMS["webdataset"]):
        notes.append("`webdataset.WebDataset` reads the tars of a copy; `json` of a sample has its other columns.")
    if any(file.content == "video" for file in files):
        notes.append("Clips are `datasets.Video`, which `torchcodec` decodes.")
    return "\n\n".join([fenced(code, "python"), *notes])


def _sources(context: RunContext, base: BaseModel, files: Sequence[DataFile]) -> str:
    config = context.config
    data: list[tuple[str, str, Any]] = (
        [] if config.data is None else [("given", portable(config.data.train).rpartition("/")[2], "")]
    )
    for split in ("train", "heldout"):
        found = Counter(prompt.metadata.get(SOURCE, "") for prompt in context.prompts[split])
        named = prompt_set(config.prompts, "heldout" if split == "heldout" else "train")
        data += [(f"{split} prompts", name or named or "of the given samples", n) for name, n in sorted(found.items())]
    licenses: Counter[str] = Counter()
    for file in files:
        licenses.update(file.licenses)
    listed = [(name or "none stated", count) for name, count in sorted(licenses.items())]
    table = _table(("part", "source", "prompts"), [(part, in_code(name), count) for part, name, count in data])
    return (
        f"{table}\n\nLicenses that rows state in the column `license` of their metadata:\n\n"
        f"{_table(('license', 'rows'), [(in_markdown(name), count) for name, count in listed])}"
    )


def _judged(context: RunContext) -> str:
    found = rating_report(context)
    names = rater_names([row["rater"] for row in found["raters"]])
    wins = [
        (
            *map(in_markdown, (row["winner"], row["loser"], row["source"])),
            row["prompts"],
            row["answers"],
            rate_text(row),
        )
        for row in found["wins"]
    ]
    agreed = [
        (", ".join(names[each] for each in row["raters"].split(", ")), row["pairs"], f"{row['share']:.3f}")
        for row in found["agreement"]
    ]
    tables = [_table(("preferred", "over", "prompts of", "prompts", "answers", "rate, 95 % interval"), wins)]
    if agreed:
        tables.append(_table(("raters", "common pairs", "equal answers"), agreed))
    return "\n\n".join(tables)


def _lineage(context: RunContext, parts: Mapping[Part, Sequence[int]]) -> list[tuple[Any, ...]]:
    """Return epoch, stage and artifact of the sources of published rows."""
    plan, chain = context.plan, context.chain
    nodes: dict[Node, None] = {Node(0, "base"): None, Node(0, "preprocess"): None}
    for part, epochs in parts.items():
        for epoch in epochs if part != "preferences" else ():
            found = plan.evaluation(epoch) if part == "evaluations" else [plan.samples_of(epoch)]
            nodes |= dict.fromkeys(found)
            if part == "rollouts":
                nodes |= dict.fromkeys([plan.policy_of(epoch), *plan.scored(epoch), Node(epoch, "advantage")])
    made = ((node, chain.find(*node)) for node in sorted(nodes, key=lambda node: node.epoch))
    return [
        (node.epoch, f"{node.stage} {in_code(node.slot)}" if node.slot else node.stage, in_code(entry.artifact))
        for node, entry in made
        if entry is not None
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
