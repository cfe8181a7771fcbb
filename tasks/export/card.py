"""The model card: description, training, results and usage of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from flowmill.configs.escaping import fenced, in_code, in_link, in_markdown, visible
from flowmill.configs.model import ModelSection, QuantizeSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.quantized import CODE
from flowmill.tasks.export.usage import Usage, snippet
from flowmill.tasks.inputs.base_model import BaseModel
from flowmill.tasks.inputs.prompts import image_column, prompt_set
from flowmill.tasks.metrics.evaluations import Figures
from flowmill.tasks.metrics.ingested import IngestedFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class CardContent:
    """The content of a card, except for the usage. Names that no fingerprint has are not in it: runs whose settings are
    equal, but for the names of the run, of files of data and of where they start from, share the export."""

    config: RunConfig
    epoch: int
    """Epochs trained."""
    base: BaseModel
    """The model that training started from."""
    base_artifact: str
    """``kind/id`` of the base model's artifact in the run's store."""
    policy: str
    """``kind/id`` of the trained policy's artifact."""
    digest: str
    prompts: str
    """``kind/id`` of the prompts' artifact, which identifies prompts by content."""
    before: Figures
    """Figures of the base model."""
    after: Figures
    """Figures of this model; empty if it was not evaluated."""
    ingested: IngestedFigures | None = None
    """The ingested samples it was trained on; None with rollouts."""
    data: str = ""
    """The section on the data behind the policy, in Markdown; empty without any."""
    picture: str | None
    """File with images before and after training, relative to the card."""
    lora: LoraSpec | None
    """The trained adapters, if any."""
    start: str | None
    """The ``kind/id`` of the policy that training started from; None: the base model."""


def model_card(content: CardContent, usage: Usage | None) -> str:
    """Return README.md: YAML front matter and text."""
    parts = [
        f"---\n{yaml_head(front(content))}---",
        f"# {in_markdown(card_title(content.base, content.config))}",
        _summary(content),
        _results(content),
        _use(content, usage),
        content.data,
        _origin(content),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def card_title(base: BaseModel, config: RunConfig) -> str:
    """Return the title of a card."""
    return f"{base.name.rpartition('/')[2]}, post-trained with {config.optimize.algorithm.name}"


def epochs_text(epoch: int) -> str:
    """Return a number of epochs as words."""
    return "1 epoch" if epoch == 1 else f"{epoch} epochs"


def front(content: CardContent) -> dict[str, Any]:
    """Return the front matter: the Hub's fields, then flowmill's own."""
    base, config = content.base, content.config
    stated = {"license": base.license.id, "license_name": base.license.name, "license_link": base.license.link}
    source = "text" if image_column(config) is None else "image"
    return {
        **base_fields(base, adapter=config.model.lora is not None),
        **{key: value for key, value in stated.items() if value is not None},
        "library_name": "diffusers",
        "pipeline_tag": f"{source}-to-{'video' if config.model.makes_clips else 'image'}",
        "tags": [
            "flowmill",
            *(["reinforcement-learning"] if content.ingested is None else []),
            config.optimize.algorithm.name,
            *(["lora"] if config.model.lora else []),
        ],
        "flowmill": {
            "base_model": base.plain(),
            **({} if config.model.quantize is None else {"quantize": config.model.quantize.model_dump()}),
            "algorithm": config.optimize.algorithm.name,
            "epochs": content.epoch,
            "prompts": {"train": prompt_set(config.prompts, "train"), "heldout": prompt_set(config.prompts, "heldout")},
            "prompts_artifact": content.prompts,
            **({} if content.ingested is None else {"data": _data(content.ingested)}),
            "rewards": [plain_reward(section) for section in config.rewards],
            "policy": content.policy,
            "digest": content.digest,
            "before": content.before,
            "after": content.after,
        },
    }


def _data(ingested: IngestedFigures) -> dict[str, Any]:
    return {**({} if ingested.dataset is None else {"source": ingested.dataset}), "rows": ingested.rows}


def base_fields(base: BaseModel, *, adapter: bool) -> dict[str, str]:
    """Return the base model for the Hub; nothing for a folder, whose name may be that of a stranger's repository."""
    if base.source != "hub":
        return {}
    return {"base_model": base.name, "base_model_relation": "adapter" if adapter else "finetune"}


def yaml_head(fields: Mapping[str, Any]) -> str:
    """Return the front matter of a card as YAML, without characters that change how text is read."""
    written = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)
    if visible(written, keep="\n") == written:
        return written
    # With allow_unicode YAML does not escape characters that change the text direction.
    return yaml.safe_dump(fields, sort_keys=False, width=1000)


def _summary(content: CardContent) -> str:
    config, base = content.config, content.base
    label = "LoRA weights for" if config.model.lora else "A whole diffusers pipeline:"
    rewards = ", ".join(f"{in_code(section.slot)} (weight {section.weight:g})" for section in config.rewards)
    commit = f" at commit {in_code(base.revision)}" if base.revision else ""
    sources = {
        "hub": f"{in_link(base.name, f'https://huggingface.co/{base.name}')}{commit}",
        "folder": f"{in_code(base.name)}, a local model",
        "file": f"{in_code(base.name)}, a local file",
    }
    named = sources.get(base.source, f"{in_code(base.name)}, a small model that flowmill built")
    how, data = " by reinforcement learning", f"the prompts of {in_code(str(prompt_set(config.prompts, 'train')))}"
    if content.ingested is not None:
        how, data = "", f"{in_markdown(content.ingested.published)} ({in_markdown(content.ingested.license_text)})"
    aim = "with the rewards" if content.ingested is None else "judged by"
    return (
        f"{label} {named}, post-trained{how} with flowmill: {epochs_text(content.epoch)} of "
        f"{in_code(config.optimize.algorithm.name)} on {data}, {aim} {rewards}."
        f"{averaged(config)}"
    )


def _results(content: CardContent) -> str:
    if not content.after:
        return f"## Results\n\n{unevaluated(content.epoch)}"
    section = content.config.evaluate
    judges = {each.slot for each in section.judges}
    steps = section.steps or content.config.rollout.steps
    lines = ["## Results", "", "| prompts | reward | before | after |", "|---|---|---|---|"]
    for split, slots in content.after.items():
        prompts = {"heldout": "held-out", "train": "training"}.get(split, in_markdown(split))
        for slot, values in slots.items():
            for figure, value in sorted(values.items(), reverse=True):
                earlier = content.before.get(split, {}).get(slot, {}).get(figure)
                shown = "not evaluated" if earlier is None else f"{earlier:.4g}"
                reward = f"{in_code(slot)}{', a judge' if slot in judges else ''}, {in_markdown(figure)}"
                lines.append(f"| {prompts} | {reward} | {shown} | {value:.4g} |")
    lines += [
        "",
        f"Each of {section.samples} samples, {steps} deterministic steps, with the same seeds before and after.",
    ]
    if content.picture is not None:
        lines += ["", f"![Equal prompts and initial noise before training and after]({content.picture})"]
    return "\n".join(lines)


def _use(content: CardContent, usage: Usage | None) -> str:
    if usage is None:
        return (
            "## Use\n\nThe model family is one of your own, whose adapter does not say how plain diffusers is called."
        )
    intro = (
        "Runs as pasted, in this folder, and draws the first image of the evaluation. The arguments are those of "
        "training: with diffusers' defaults instead, results look untrained. `generation.json` holds the same settings."
    )
    lines = ["## Use", "", intro, "", fenced(snippet(usage), "python")]
    if usage.base is not None and content.base.source != "hub":
        lines += ["", folder_note(usage.base, content.base, content.base_artifact)]
    if (lora := content.lora) is not None:
        lines += [
            "",
            f"Use the LoRA at strength 1 (rank {lora.rank}): the scale of training, alpha / rank = {lora.alpha} / "
            f"{lora.rank} = {lora.alpha / lora.rank:g}, is folded into its tensors, so that "
            "readers that know of no alpha get it too.",
        ]
    notes, solver = [*usage.call.differences, *quantized_notes(content.config.model)], content.config.evaluate.solver
    if solver != "euler":
        notes.append(f"The evaluation used the solver {in_code(solver)}; this call takes Euler steps.")
    if usage.dtype != "float32":
        notes.append(f"It decodes in {usage.dtype} and keeps latents in it; the evaluation did both in float32.")
    if notes:
        lines += ["", "What plain diffusers does differently:", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def unevaluated(epoch: int) -> str:
    """Return the sentence in place of figures."""
    return f"The policy after epoch {epoch} was not evaluated."


def averaged(config: RunConfig) -> str:
    """Return, after a space, that the weights are an average; empty if they are not."""
    return " The weights are the moving average of those trained." if config.optimize.ema else ""


def folder_note(name: str, base: BaseModel, artifact: str) -> str:
    """Return the note that a base model's name in the call is a folder: a reader could take it for a repository.
    ``artifact``: ``kind/id`` of the base model."""
    stored = f"it is `pipeline` in the store's artifact {in_code(artifact)}. Put it, or a link to it, here."
    put = stored if base.source in ("built", "file") else "put it, or a link to it, here."
    return f"{in_code(name)} is the folder of the base model; {put}"


def quantized_notes(model: ModelSection) -> list[str]:
    """Return the parts that the call of an export loads whole and training did not, a sentence each."""
    section = model.quantize or QuantizeSection()
    parts = (("base model", section.name), ("text encoders", section.text_encoders))
    return [
        f"The call loads the {part} unquantized, so that results differ slightly. Training and evaluation rounded the "
        f"linear layers to {name}, as `quantization_config={CODE[name]}` does."
        for part, name in parts
        if name is not None
    ]


def _origin(content: CardContent) -> str:
    base = content.base
    stated = {
        "unknown": "unknown: the base model's folder states none. Find out before you share these weights.",
        "other": f"see {in_link(str(base.license.link), str(base.license.link))}, the base model's.",
    }
    begun = start_sentence(content.config, content.start)
    return "\n".join(
        [
            "## Origin",
            "",
            *([f"- {begun}"] if begun else []),
            f"- License: {stated.get(base.license.id, f'{in_markdown(base.license.id)}, as the base model states.')}",
            f"- Policy: {in_code(content.policy)}, digest {in_code(content.digest)}",
            f"- Prompts: {in_code(content.prompts)}",
        ]
    )


def start_sentence(config: RunConfig, policy: str | None) -> str:
    """Return the sentence on the start of training, empty for the base model. ``policy``: ``kind/id``, or None."""
    if policy is not None:
        return f"Training started from the policy {in_code(policy)}."
    lora = config.model.lora
    return "" if lora is None or lora.start is None else "Training began with trained adapters."


def plain_reward(section: RewardSection) -> Mapping[str, Any]:
    """Return name, label and weight of a reward; its options may name places on this machine."""
    label = {} if section.label is None else {"label": section.label}
    return {"name": section.name, **label, "weight": section.weight}
