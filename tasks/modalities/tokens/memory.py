"""GPU memory of a language model's run by role and phase, from the model's config alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowmill.configs.model_families import most_images
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.tokens import Widths
from flowmill.models.memory.language_architectures import language_config, meta_language_model
from flowmill.models.memory.language_models import TextFootprints, encoding_bytes, text_footprints
from flowmill.models.policies import POLICIES
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import block_lists
from flowmill.models.policies.language_model_folders import context_length
from flowmill.models.weights.lora import within
from flowmill.tasks.advantages.estimators import make_estimator
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import decode_rows, lora_spec, tokens_of
from flowmill.tasks.inputs.renderer import sees_images
from flowmill.tasks.inputs.source_prompts import source_prompts
from flowmill.tasks.modalities.memory import BYTES, Memory, OptimizerSizes, Role, Sizes, host_memory
from flowmill.tasks.modalities.tokens.critic_memory import Apart, CriticMemory, frozen_bytes
from flowmill.tasks.modalities.tokens.rendering import drawing_of
from flowmill.tasks.modalities.tokens.run_prompts import largest_image, longest_prompt, shared_members

#: Assumed maximum tokens that a chat template adds to a prompt, without a tokenizer.
_TEMPLATE = 64
#: Assumed tokens of a prompt with images, without a processor and limits.
_IMAGE_PROMPT = 4096


#: Phases, in order, and the working memory of some.
_PHASES = ("rollout", "decode", "re-score", "render", "value", "optimize")
_WORK = {"rollout": "sample", "decode": "decode", "re-score": "rescore", "value": "value"}


def language_memory(
    config: RunConfig, requires: Requirements, optimizer: OptimizerSizes, *, reference: bool
) -> Memory | None:
    """Return the memory of a rank; None if the model's config is unknown (a model to build, or not published here).

    Args:
        config: the config.
        requires: its algorithm's needs.
        optimizer: sizes of its optimizer's state.
        reference: log-probs of the base model are needed.
    """
    quiet_libraries()
    architecture = None if config.model.path is None else language_config(config.model.path)
    if architecture is None:
        return None
    model, execution = config.model, config.execution
    family: type[CausalLM] = resolve(POLICIES, model.policy, label="model.policy")
    spec, untrained = lora_spec(config, family), family.untrained_parts(model.options)
    sizes = Sizes(config, optimizer, spec)
    module, copies = meta_language_model(architecture, models=family.models), int(config.optimize.ema is not None)
    blocks = [name for name in block_lists(module) if not within(name, untrained)]
    actor = sizes.role(module, blocks, dtype=model.dtype, copies=copies, untrained=untrained, quantizer=model.quantizer)
    critic = CriticMemory.of(config, architecture, sizes, untrained) if requires.critic else CriticMemory()
    dtype, device = getattr(torch, model.dtype), torch.device("cpu")
    own, settings = config.critic.backbone == "own", family.settings_for(config, dtype=dtype, device=device, empty=True)
    measured = text_footprints(architecture, settings, spec, critic=critic.settings, own=own, family=family)
    prompt, notes = _prompt_tokens(config, context_length(architecture))
    forward = _forward(config, prompt, width := _width(config, prompt, architecture))
    apart = critic.apart(forward.rows, forward.width)
    work = _work(config, measured, apart, prompt=prompt, forward=forward, reference=reference)
    compared = reference or make_estimator(config).needs_reference
    drawing, drawing_notes = drawing_of(config)
    roles = [role for role in (actor, critic.anywhere) if role is not None]
    largest = 0 if execution.holders > 1 else max(role.parameters for role in roles)
    details: dict[str, Any] = {
        "actor": asdict(actor),
        "critic": None if critic.critic is None else asdict(critic.critic),
        "critic_kind": critic.kind,
        "reference": frozen_bytes(module, BYTES[model.dtype]) // execution.holders if compared and spec is None else 0,
        "reference_kind": "" if not compared else "a frozen copy" if spec is None else "the actor, adapters off",
        "drawing": None if drawing is None else asdict(drawing),
        "keeps_drawing": execution.keep_renderer,
        "seeing": _seeing(config, architecture, trained=not untrained),
        **work,
        "notes": (*notes, *drawing_notes, *apart.notes),
    }
    needed = {**work, "render": drawing}
    names = tuple(name for name in _PHASES if needed.get(_WORK.get(name, name), 0) is not None)
    return Memory(
        parameters=actor.parameters,
        trained=actor.trained,
        tokens=width,
        names=names,
        lines=_lines(details, names, actor, critic.critic),
        between=actor.whole + details["reference"],
        host=host_memory(roles, read=largest * BYTES[model.dtype]),
        details=details,
        notes=details["notes"],
    )


class _Forward(NamedTuple):
    """The shape of a micro-batch of training."""

    rows: int
    width: int
    mask: int
    """Bytes of its mask of single tokens."""


def _width(config: RunConfig, prompt: int, architecture: Any) -> int:
    most = prompt + tokens_of(config).max_new
    return Widths(most=most, limit=context_length(architecture)).of(most)


def _forward(config: RunConfig, prompt: int, width: int) -> _Forward:
    """Return the shape of rows, or of groups that share their prompt."""
    rows, members = config.execution.micro_batch_size, shared_members(config)
    if members is None:
        return _Forward(rows, width, 0)
    groups, tokens = -(-rows // members), prompt + members * tokens_of(config).max_new
    # Where tokens are visible, as bool, and as a term of scores.
    return _Forward(groups, tokens, groups * tokens**2 * (1 + BYTES[config.model.dtype]))


def _work(
    config: RunConfig, measured: TextFootprints, apart: Apart, *, prompt: int, forward: _Forward, reference: bool
) -> dict[str, int | None]:
    """Return the cache, and the logits and activations of each phase; no values: None."""
    execution, estimator, section = config.execution, make_estimator(config), tokens_of(config)
    rows, width, mask = forward
    sampled = measured.sampling(execution.rollout_batch_size, prompt=prompt, new=section.max_new)
    valuing = None
    if estimator.needs_values or estimator.needs_reference:
        valuing = max(measured.valuing(rows, width, reference=estimator.needs_reference), apart.value) + mask
    training = measured.training(rows, width, reference=reference and not estimator.needs_reference)
    return {
        "cache": sampled.cache,
        "sample": sampled.work,
        "decode": measured.drawing(decode_rows(config)),
        "rescore": measured.scoring(min(execution.rollout_batch_size, rows), width) + mask if section.rescore else 0,
        "value": valuing,
        "optimize_activations": training + apart.training + mask,
    }


def _lines(
    details: Mapping[str, Any], names: Sequence[str], actor: Role, critic: Role | None
) -> dict[str, dict[str, int]]:
    """Return weights and working memory of every role, by phase."""
    roles, drawing = [role for role in (actor, critic) if role is not None], details["drawing"]
    lines = {"actor": {**dict.fromkeys(names, actor.whole), "optimize": actor.spread}}
    if critic is not None:
        values = {name: critic.whole for name in names if name == "value"}
        lines[f"critic: {details['critic_kind']}"] = {**values, "optimize": critic.spread}
    if details["reference_kind"]:
        # It stays after it is loaded.
        lines[f"reference: {details['reference_kind']}"] = dict.fromkeys(names, details["reference"])
    work = {name: details[key] for name, key in _WORK.items() if name in names}
    work["optimize"] = max(details["optimize_activations"], *(role.step for role in roles))
    if drawing is not None:
        during = names if details["keeps_drawing"] else ("render",)
        lines["image model of render"] = dict.fromkeys(during, drawing["weights"])
        work["render"] = drawing["work"]
    lines["gradients, moments, averages"] = {"optimize": sum(role.state for role in roles)}
    lines["KV cache"] = {"rollout": details["cache"]}
    if details["seeing"]:
        lines["images and their features"] = dict.fromkeys(names, details["seeing"])
    lines["logits and activations"] = work
    return lines


def _seeing(config: RunConfig, architecture: Any, *, trained: bool) -> int:
    """Return the bytes of encoding the largest image of the prompts and turns, and of cached features; 0 where
    there are none, or their processor is not here."""
    folder = Path(str(config.model.path)).expanduser()
    if not folder.is_dir():
        return 0
    prompts = [prompt for split in source_prompts(config).values() for prompt in split if prompt.images]
    image = largest_image(folder, config, prompts) if prompts or sees_images(config) else None
    return 0 if image is None else encoding_bytes(architecture, image, trained=trained)


def _prompt_tokens(config: RunConfig, context: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of the longest prompt, and notes on their source."""
    section = tokens_of(config)
    splits = source_prompts(config)
    folder = Path(str(config.model.path)).expanduser()
    if folder.is_dir():
        return longest_prompt(folder, config, splits), ()
    room = () if context is None else (context - section.max_new,)
    reads = most_images(config.model.policy, config.model.options)
    if reads and any(prompt.images for prompts in splits.values() for prompt in prompts):
        tokens = min((*room, *(() if section.max_prompt is None else (section.max_prompt,))), default=_IMAGE_PROMPT)
        return tokens, (
            f"memory: prompts with images are assumed to have up to {tokens} tokens, and encoding images is not "
            "counted, because the processor is not here yet. rollout.tokens.max_prompt limits them.",
        )
    # A token of a byte-level tokenizer is at least one byte.
    longest = max(len(prompt.text.encode()) for prompts in splits.values() for prompt in prompts) + _TEMPLATE
    longest += sum(len(text.encode()) for text in (section.system, section.instruction) if text is not None)
    tokens = max(1, min(longest, *room, *(() if section.max_prompt is None else (section.max_prompt,))))
    return tokens, (
        f"memory: prompts are assumed to have up to {tokens} tokens, because the tokenizer is not here yet. "
        "rollout.tokens.max_prompt limits them.",
    )
