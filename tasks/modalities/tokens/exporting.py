"""Exports of language models, for plain ``from_pretrained`` calls of transformers or peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flowmill.configs.escaping import in_code, in_markdown, in_python
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.weights.lora_files import PEFT_CONFIG
from flowmill.tasks.export.card import (
    averaged,
    base_fields,
    card_title,
    epochs_text,
    folder_note,
    quantized_notes,
    start_sentence,
    unevaluated,
)
from flowmill.tasks.export.provenance import data_section
from flowmill.tasks.export.publish import HERE
from flowmill.tasks.inputs.base_model import BaseModel, license_files
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.weight_sources import PIPELINE, Weights
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.prompts import Prompts, with_places
from flowmill.tasks.modalities.tokens.run_prompts import prompts_in

if TYPE_CHECKING:
    from flowmill.tasks.modalities.modality import ExportRequest

_MODEL = f"""from transformers import {{auto}}, {{reader}}

folder = {HERE}
model = {{auto}}.from_pretrained(folder)"""
_ADAPTER = f"""from peft import PeftModel
from transformers import {{auto}}, {{reader}}, GenerationConfig

folder = {HERE}
model = {{auto}}.from_pretrained({{base}})
# That of the base model may change probabilities, and end texts elsewhere.
model.generation_config = GenerationConfig.from_pretrained(folder)
model = PeftModel.from_pretrained(model, folder)"""
#: How prompts are read.
_READERS = {
    "AutoTokenizer": "tokenizer = AutoTokenizer.from_pretrained(folder)",
    "AutoProcessor": "processor = AutoProcessor.from_pretrained(folder)\ntokenizer = processor.tokenizer",
}
#: Replaces the clock of a template: fixed dates, by format.
_CLOCK = "{{% macro strftime_now(format) %}}{{{{ {dates}[format] }}}}{{% endmacro %}}"
_USAGE = """{tokenizer}
{inputs}
drawn = {{"do_sample": True, "temperature": {temperature}, "top_k": 0, "top_p": 1.0}}
ids = model.generate(**inputs, max_new_tokens={max_new}, **drawn{stops})
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
_CARD = """---
{front}
---

# {title}

Trained from {base} with {epochs} of {algorithm}{data}.{averaged}{start}{quantized}

```python
{load}
{usage}
```
{placed}
{figures}
{section}"""

#: Settings of a generation config that do not affect sampling, except for end tokens.
_GENERATION_SETTINGS = (
    "bos_token_id",
    "pad_token_id",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "_from_model_config",
)


class LanguageModelExport:
    """A model folder, or an adapter and the base model's name; with card and settings."""

    def __init__(self, exporting: ExportRequest) -> None:
        self._exporting, self._context, self._config = exporting, exporting.context, exporting.config

    def write(self, folder: Path) -> None:
        """Write model, tokenizer, settings and card."""
        trainable = self._exporting.host.exportable(self._exporting.inputs[0], Weights.AVERAGE)
        policy, target, base = cast(CausalLM, trainable.policy), folder / PIPELINE, self._exporting.base
        target.mkdir(parents=True)
        write_model(policy, target, adapters=self._exporting.format == "lora")
        if self._exporting.format == "lora" and base.source == "hub":
            # peft itself would look up the repository when it writes the adapter.
            settings = json.loads((target / PEFT_CONFIG).read_text())
            settings |= {"base_model_name_or_path": base.name, "revision": base.revision}
            (target / PEFT_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True))
        for path in license_files(self._context.base_folder):
            (target / path.name).write_bytes(path.read_bytes())
        settings = tokens_of(self._config).model_dump(mode="json", exclude={"engine"})
        (target / "generation.json").write_text(json.dumps(settings, indent=2) + "\n")
        (target / "README.md").write_text(self._card(base, policy))

    def _card(self, base: BaseModel, policy: CausalLM) -> str:
        epoch, config = self._exporting.epoch, self._config
        start = (self._context.starts_from or {}).get("policy")
        lora = self._exporting.format == "lora"
        placed = lora and base.source != "hub"
        data = None if config.data is None else RunView(self._context).ingested()
        names = {"auto": policy.models.auto, "reader": policy.models.reader}
        head = {
            **base_fields(base, adapter=lora),
            "library_name": "peft" if lora else "transformers",
            "pipeline_tag": policy.models.task,
            "license": base.license.id,
        }
        values = {
            "front": "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items()),
            "title": in_markdown(card_title(base, config)),
            "base": in_code(base.name),
            "start": f" {begun}" if (begun := start_sentence(config, start)) else "",
            "epochs": epochs_text(epoch),
            "algorithm": in_code(config.optimize.algorithm.name),
            "data": "" if data is None else f" on {in_markdown(data.published)} ({in_markdown(data.license_text)})",
            "quantized": "".join(f" {note}" for note in quantized_notes(config.model)),
            "load": (_ADAPTER if lora else _MODEL).format(base=_base_call(base), **names),
            "usage": self._usage(policy),
            "averaged": averaged(config),
            "placed": f"\n{folder_note(base.name, base, str(self._exporting.inputs[1]))}\n" if placed else "",
            "figures": "\n".join(self._figures()),
            "section": f"\n{data_text}\n" if (data_text := data_section(self._context, epoch)) else "",
        }
        return _CARD.format(**values)

    def _usage(self, policy: CausalLM) -> str:
        section = tokens_of(self._config)
        stops = ", ".join(map(in_python, section.stop))
        return _USAGE.format(
            tokenizer=_READERS[policy.models.reader],
            inputs=call_of(self._prompts(policy)),
            max_new=section.max_new,
            temperature=section.temperature,
            stops=f", stop_strings=[{stops}], tokenizer=tokenizer" if stops else "",
        )

    def _prompts(self, policy: CausalLM) -> Prompts:
        return prompts_in(self._context.base_folder, self._context.plan, tokenizer=policy.tokenizer)

    def _figures(self) -> list[str]:
        chain, epoch = self._context.chain, self._exporting.epoch
        before, after = evaluation_figures(chain, 0), evaluation_figures(chain, epoch)
        if not after:
            return [unevaluated(epoch)]
        rows = ["| reward | prompts | before | after |", "|---|---|--:|--:|"]
        for split, rewards in after.items():
            for slot, figures in rewards.items():
                was = before.get(split, {}).get(slot, {}).get("mean")
                start = "not evaluated" if was is None else f"{was:.3f}"
                end = f"{figures['mean']:.3f}" if "mean" in figures else ""
                rows.append(f"| {in_markdown(slot)} | {in_markdown(split)} | {start} | {end} |")
        return rows


def call_of(prompts: Prompts) -> str:
    """Return the code that makes the inputs for a prompt as training does."""
    prompt = prompts.section.instructed("...")
    if not prompts.chat:
        call = f'inputs = tokenizer({in_python(prompt)}, return_tensors="pt")'
        # Remove the end tokens that the tokenizer appends.
        ends = f"\ninputs = {{name: rows[:, :-{prompts.ends}] for name, rows in inputs.items()}}"
        return call + ends if prompts.ends else call
    messages = [{"role": role, "content": content} for role, content in prompts.messages(prompt)]
    if prompts.pictures is not None:
        messages = with_places(messages, [{"type": "image", "path": "image.png"}])
    chat = in_python_of(messages)
    how = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
    dates = prompts.template_dates(prompt)
    dated = (
        f"tokenizer.chat_template = {in_python(_CLOCK.format(dates=dates))} + tokenizer.chat_template\n"
        if dates
        else ""
    )
    reader = "tokenizer" if prompts.pictures is None else "processor"
    how = how if prompts.pictures is None else f"tokenize=True, {how}"
    return f"{dated}messages = {chat}\ninputs = {reader}.apply_chat_template(messages, {how})"


def in_python_of(value: Any) -> str:
    """Return code of lists, mappings and texts."""
    if isinstance(value, list):
        return f"[{', '.join(map(in_python_of, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{in_python_of(key)}: {in_python_of(each)}' for key, each in value.items())}}}"
    return in_python(value)


def _base_call(base: BaseModel) -> str:
    revision = "" if base.revision is None else f", revision={in_python(base.revision)}"
    return f"{in_python(base.name)}{revision}"


def write_model(policy: CausalLM, folder: Path, *, adapters: bool) -> None:
    """Write a model, or only its adapters, with its tokenizer, in the format of ``from_pretrained``."""
    policy.model.generation_config = generation_config(policy)
    if adapters:
        policy.save_lora(folder)
    else:
        policy.model.save_pretrained(folder)
    policy.save_reader(folder)


def generation_config(policy: CausalLM) -> Any:
    """Return a generation config with the start, end and padding tokens, and settings that do not affect sampling.

    The base model's generation config may change probabilities (``repetition_penalty``, ``min_p``,
    ``suppress_tokens``), unlike rollouts, or hold settings that transformers does not save.
    """
    from transformers import GenerationConfig

    base, ends = policy.model.generation_config.to_dict(), sorted(policy.eos)
    stated = base.get("eos_token_id")
    # Keep a single id, or an equal list in its order.
    same = stated is not None and sorted({*stated} if isinstance(stated, list) else {stated}) == ends
    settings = {
        name: base[name] for name in (*_GENERATION_SETTINGS, *policy.models.generation) if base.get(name) is not None
    }
    return GenerationConfig(**settings, eos_token_id=stated if same else ends or None)
