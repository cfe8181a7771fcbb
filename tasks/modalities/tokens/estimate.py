"""Device memory of a language model's run by role and phase, from the model's config alone.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import quiet_transformers
from flowmill.models.maths.tokens import Widths
from flowmill.models.memory import language_models as work_of
from flowmill.models.memory.architectures import parameters
from flowmill.models.memory.language_architectures import language_config, meta_critic, meta_language_model
from flowmill.models.memory.language_models import LanguageModelMemory
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.critic_lm import block_lists
from flowmill.models.policies.language_model_folders import context_length
from flowmill.models.weights.lora import within
from flowmill.tasks.inputs.components import decode_rows, tokens_of
from flowmill.tasks.inputs.renderer import sees_images
from flowmill.tasks.modalities.memory import (
    BYTES,
    MASTER,
    DrawingMemory,
    Memory,
    OptimizerSizes,
    Role,
    Sizes,
    host_memory,
)
from flowmill.tasks.modalities.tokens.run_prompts import largest_image, longest_prompt, shared_members
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.turns import turns_of

#: Assumed maximum tokens that a chat template adds to a prompt, without a tokenizer.
_TEMPLATE = 64
#: Assumed tokens of a prompt with images, without a processor and limits.
_IMAGE_PROMPT = 4096
#: Phases, in order, and the working memory of some.
_PHASES = ("rollout", "decode", "re-score", "render", "value", "optimize")
_WORK = {"rollout": "sample", "decode": "decode", "re-score": "rescore", "value": "value"}


def language_memory(plan: RunPlan, optimizer: OptimizerSizes, *, reference: bool) -> Memory | None:
    """Return the memory of a rank; None if the model's config is unknown (a model to build, or not published here).

    Args:
        plan: of the config.
        optimizer: sizes of its optimizer's state.
        reference: log-probs of the base model are needed.
    """
    quiet_transformers()
    config, family, spec = plan.config, plan.family, plan.lora
    architecture = None if config.model.path is None else language_config(config.model.path)
    if architecture is None:
        return None
    model, execution = config.model, config.execution
    sizes, untrained = Sizes(config, optimizer, spec), family.untrained_parts(model.options)
    module, copies = meta_language_model(architecture, models=family.models), int(config.optimize.ema is not None)
    blocks = [name for name in block_lists(module) if not within(name, untrained)]
    actor = sizes.role(module, blocks, dtype=model.dtype, copies=copies, untrained=untrained, quantizer=model.quantizer)
    critic = _critic(config, architecture, sizes, untrained) if plan.requires.critic else None
    settings = family.settings_for(config, dtype=getattr(torch, model.dtype), device=torch.device("cpu"), empty=True)
    together = None if critic is None or critic.alone else critic.measured.critic
    own = config.critic.backbone == "own"
    traces = LanguageModelMemory(architecture, settings, spec, together, own, family)
    prompt, notes = _prompt_tokens(plan, context_length(architecture))
    forward = _forward(config, prompt, width := _width(config, prompt, architecture))
    work = _work(plan, traces, critic, prompt=prompt, forward=forward, reference=reference)
    compared = reference or plan.estimator.needs_reference
    drawing, drawing_notes = _drawing(plan)
    roles = [actor] if critic is None else [actor, critic.role]
    largest = 0 if execution.holders > 1 else max(role.parameters for role in roles)
    details: dict[str, Any] = {
        "actor": asdict(actor),
        "critic": None if critic is None else asdict(critic.role),
        "critic_kind": "" if critic is None else _critic_kind(config),
        "reference": _frozen_bytes(module, BYTES[model.dtype]) // execution.holders if compared and spec is None else 0,
        "reference_kind": "" if not compared else "a frozen copy" if spec is None else "the actor, adapters off",
        "drawing": None if drawing is None else asdict(drawing),
        "seeing": _seeing(plan, architecture, trained=not untrained),
        **work,
        "notes": (*notes, *drawing_notes),
    }
    needed = {**work, "render": drawing}
    names = tuple(name for name in _PHASES if needed.get(_WORK.get(name, name), 0) is not None)
    return Memory(
        parameters=actor.parameters,
        trained=actor.trained,
        tokens=width,
        names=names,
        lines=_lines(details, names, actor, None if critic is None else critic.role),
        between=actor.whole + details["reference"],
        host=host_memory(roles, read=largest * BYTES[model.dtype]),
        details=details,
        notes=details["notes"],
    )


@dataclass(frozen=True, slots=True)
class _Critic:
    """The critic of a run."""

    role: Role
    """Its sizes on its device."""
    measured: LanguageModelMemory
    """Measures it."""
    alone: bool
    """It has its own model; else its activations are measured together with the policy's."""


def _critic(config: RunConfig, architecture: Any, sizes: Sizes, untrained: Sequence[str]) -> _Critic:
    section, model, own = config.critic, config.model, config.critic.backbone == "own"
    architecture = architecture if section.path is None else language_config(section.path)
    dtype, values = section.dtype or model.dtype, meta_critic(architecture, own=own)
    settings = PolicySettings(
        dtype=getattr(torch, dtype), gradient_checkpointing=model.gradient_checkpointing, attention=model.attention
    )
    blocks = () if values.backbone is None else block_lists(values.backbone)
    lists = tuple(f"backbone.{name}" for name in blocks if not within(name, untrained))
    return _Critic(
        sizes.role(values, lists, dtype=dtype, copies=0, head=values.head, untrained=untrained),
        LanguageModelMemory(architecture, settings, sizes.spec, settings, own),
        section.path is not None,
    )


def _critic_kind(config: RunConfig) -> str:
    if config.critic.backbone == "policy":
        return "a head on the actor"
    kind = "a copy of its own" if config.critic.path is None else "a model of its own"
    return kind if config.model.lora is None else f"{kind}, with adapters"


def _frozen_bytes(module: Any, number: int) -> int:
    """Return the bytes of a frozen copy; all layers except linear ones are float32, including tied weights."""
    precise = {
        id(parameter): parameter.numel()
        for layer in module.modules()
        if not isinstance(layer, torch.nn.Linear)
        for parameter in layer.parameters(recurse=False)
    }
    high: int = sum(precise.values())
    return high * MASTER + (parameters(module) - high) * number


def _drawing(plan: RunPlan) -> tuple[DrawingMemory | None, tuple[str, ...]]:
    config = plan.config
    if config.render is None:
        return None, ()
    model, memory = config.render.model, plan.drawer.modality.drawing_memory(plan.drawer)
    if memory is None:
        return None, (f"memory: render.model '{model.path or model.policy}' is not counted, because it is unknown.",)
    return memory, ()


class _Forward(NamedTuple):
    """The shape of a micro-batch of training."""

    rows: int
    width: int
    tail: int
    """Its last tokens, whose logits are used."""
    mask: int
    """Bytes of its mask of single tokens."""


def _width(config: RunConfig, prompt: int, architecture: Any) -> int:
    most = prompt + tokens_of(config).max_new
    return Widths(most=most, limit=context_length(architecture)).of(most)


def _forward(config: RunConfig, prompt: int, width: int) -> _Forward:
    """Return the shape of rows, or of groups that share their prompt."""
    rows, members, new = config.execution.micro_batch_size, shared_members(config), tokens_of(config).max_new
    if members is None:
        # A conversation may begin to be chosen anywhere.
        return _Forward(rows, width, min(width, new) if turns_of(config) is None else width, 0)
    groups, tokens = -(-rows // members), prompt + members * new
    # Where tokens are visible, as bool, and as a term of scores.
    return _Forward(groups, tokens, members * new, groups * tokens**2 * (1 + BYTES[config.model.dtype]))


def _work(
    plan: RunPlan,
    traces: LanguageModelMemory,
    critic: _Critic | None,
    *,
    prompt: int,
    forward: _Forward,
    reference: bool,
) -> dict[str, int | None]:
    """Return the cache, and the logits and activations of each phase; no values: None."""
    config, estimator, trace = plan.config, plan.estimator, traces.trace
    execution, section = config.execution, tokens_of(config)
    rows, width, tail, mask = forward
    sampled = execution.rollout_batch_size
    whole, cache = trace(work_of.go_on, sampled, prompt + section.max_new - 1)
    valuing, compared = None, estimator.needs_reference
    if estimator.needs_values or compared:
        valuing = trace(work_of.value, rows, width, tail, compared).peak
    training = trace(work_of.train, rows, width, tail, reference and not compared, gradient=True).peak
    if critic is not None and critic.alone:
        value = critic.measured.trace(work_of.value, rows, width, tail, False).peak
        trained = critic.measured.trace(work_of.train_critic, rows, width, gradient=True).peak
        valuing, training = max(valuing or 0, value), training + trained
    drawn = None
    if traces.family.models.draws:
        tokens = int(traces.config.vision_config.num_image_tokens)
        drawn = trace(work_of.draw_images, decode_rows(config), tokens).peak
    return {
        "cache": cache,
        "sample": max(0, whole - cache, trace(work_of.begin, sampled, prompt).peak - cache),
        "decode": drawn,
        "rescore": trace(work_of.score, min(sampled, rows), width, tail).peak + mask if section.rescore else 0,
        "value": None if valuing is None else valuing + mask,
        "optimize_activations": training + mask,
    }


def _lines(
    details: Mapping[str, Any], names: Sequence[str], actor: Role, critic: Role | None
) -> dict[str, dict[str, int]]:
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
        lines["image model of render"] = {"render": drawing["weights"]}
        work["render"] = drawing["work"]
    lines["gradients, moments, averages"] = {"optimize": sum(role.state for role in roles)}
    lines["KV cache"] = {"rollout": details["cache"]}
    if details["seeing"]:
        lines["images and their features"] = dict.fromkeys(names, details["seeing"])
    lines["logits and activations"] = work
    return lines


def _seeing(plan: RunPlan, architecture: Any, *, trained: bool) -> int:
    """Return the bytes of encoding the largest image of the prompts and turns, and of cached features; 0 where
    there are none, or their processor is not here."""
    folder = user_path(str(plan.config.model.path))
    if not folder.is_dir():
        return 0
    prompts = [prompt for split in plan.prompts.values() for prompt in split if prompt.images]
    image = largest_image(folder, plan, prompts) if prompts or sees_images(plan.config) else None
    return 0 if image is None else work_of.encoding_bytes(architecture, image, trained=trained)


def _prompt_tokens(plan: RunPlan, context: int | None) -> tuple[int, tuple[str, ...]]:
    section, splits = tokens_of(plan.config), plan.prompts
    folder = user_path(str(plan.config.model.path))
    if folder.is_dir():
        return longest_prompt(folder, plan), ()
    room = () if context is None else (context - section.max_new,)
    if plan.most_images and any(prompt.images for prompts in splits.values() for prompt in prompts):
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
