"""GPU memory of a language model's run by role and phase, from the model's config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.registry import resolve
from configs.schema import RunConfig
from models.library_loading import quiet_libraries
from models.maths.tokens import Widths
from models.memory.language_architectures import language_config, meta_language_model
from models.memory.language_models import TextFootprints
from models.policies import POLICIES
from models.policies.critic_lm import block_lists
from models.policies.language_model_folders import context_length, load_tokenizer
from tasks.advantages.estimators import make_estimator
from tasks.algorithms.base import Requirements
from tasks.inputs.components import lora_spec, tokens_of
from tasks.inputs.prompts import source_prompts
from tasks.modalities.memory import (
    BYTES,
    DrawingMemory,
    OptimizerSizes,
    less_to_sample,
)
from tasks.modalities.tokens.model_roles import BesideMemory, Role, Sizes, frozen_bytes, settings_of
from tasks.modalities.tokens.prompts import Prompts
from tasks.modalities.tokens.rendering import drawing_of

#: Assumed maximum tokens that a chat template adds to a prompt, without a tokenizer.
_TEMPLATE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageMemory:
    """Estimates for one rank, in bytes."""

    actor: Role
    """The policy."""
    critic: Role | None
    """The critic, if there is one."""
    critic_kind: str
    """Description of the critic."""
    reference: int
    """The frozen copy of the base model, for a KL with full weights; 0 with adapters, or without a KL."""
    reference_kind: str
    """Description of the base model; empty without a comparison."""
    drawing: DrawingMemory | None
    """The model that renders the texts, on this device; None if there is none, or if it is unknown."""
    keeps_drawing: bool
    """The renderer stays on the device while the language model works."""
    tokens: int
    """Maximum tokens of one row, prompt and completion, padded."""
    cache: int
    """Keys and values of ``execution.rollout_batch_size`` rows."""
    sample: int
    """Logits and activations of sampling these rows."""
    rescore: int
    """Logits and activations of the forwards over whole rows at the end of a rollout."""
    value: int | None
    """Logits and activations of ``execution.micro_batch_size`` rows through critic and base model; None: no stage."""
    optimize_activations: int
    """Logits of ``execution.micro_batch_size`` rows, and the activations kept for their backward pass."""
    host: dict[str, int]
    """Host memory, by content."""
    notes: tuple[str, ...]
    """Omissions of the estimate, a sentence each."""

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""
        return self.actor.parameters

    @property
    def trained(self) -> int:
        """Trained parameters of the policy."""
        return self.actor.trained

    @property
    def between(self) -> int:
        """Device memory that stays in use while samples are scored."""
        return self.actor.whole + self.reference

    @property
    def lines(self) -> dict[str, dict[str, int]]:
        """Weights and working memory of every role, by phase."""
        sampling = ("rollout", "re-score")
        valued = () if self.value is None else ("value",)
        drawn = () if self.drawing is None else ("render",)
        lines = {
            "actor": {**dict.fromkeys((*sampling, *drawn, *valued), self.actor.whole), "optimize": self.actor.spread},
        }
        if self.critic is not None:
            held = dict.fromkeys(valued, self.critic.whole)
            lines[f"critic: {self.critic_kind}"] = {**held, "optimize": self.critic.spread}
        if self.reference_kind:
            # It stays after it is loaded.
            held = dict.fromkeys((*sampling, *drawn, *valued, "optimize"), self.reference)
            lines[f"reference: {self.reference_kind}"] = held
        if self.drawing is not None:
            during = (*sampling, *drawn, *valued, "optimize") if self.keeps_drawing else drawn
            lines["image model of render"] = dict.fromkeys(during, self.drawing.weights)
        state = self.actor.state + (0 if self.critic is None else self.critic.state)
        lines["gradients, moments, averages"] = {"optimize": state}
        lines["KV cache"] = {"rollout": self.cache}
        step = max(role.step for role in (self.actor, self.critic) if role is not None)
        at_work = {"rollout": self.sample, "re-score": self.rescore}
        if self.drawing is not None:
            at_work["render"] = self.drawing.work
        if self.value is not None:
            at_work["value"] = self.value
        lines["logits and activations"] = {**at_work, "optimize": max(self.optimize_activations, step)}
        return lines

    @property
    def phases(self) -> dict[str, int]:
        """Memory of each phase."""
        drawn = () if self.drawing is None else ("render",)
        names = ("rollout", "re-score", *drawn, *(() if self.value is None else ("value",)), "optimize")
        return {name: sum(line.get(name, 0) for line in self.lines.values()) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "parameters": self.parameters, "trained": self.trained, **self.phases}

    def advice(self, config: RunConfig, limit: int) -> list[str]:
        """Return changes that make a run fit ``limit`` bytes per GPU; empty when it does."""
        return [f"{phase}: {self._change(config, phase, limit)}" for phase, size in self.phases.items() if size > limit]

    def less_between(self, config: RunConfig) -> str:
        """Return '': weights are whole while texts are sampled."""
        return ""

    def _change(self, config: RunConfig, phase: str, limit: int) -> str:
        execution, model = config.execution, config.model
        sampling = phase in ("rollout", "re-score")
        name = {"rollout": "rollout_batch_size", "render": "render_rows"}.get(phase, "micro_batch_size")
        size = getattr(execution, name)
        # Re-scoring uses at most the rows of a sampling batch.
        held = min(size, execution.rollout_batch_size) if sampling else size
        per_batch = ("KV cache", "logits and activations")
        lines = self.lines
        batch = sum(lines[line].get(phase, 0) for line in per_batch)
        room = limit - (self.phases[phase] - batch)
        rows = room * held // max(1, batch)
        if 1 <= rows < held:
            return f"set execution.{name}={rows}"
        if phase == "render":
            return "set execution.render_device to another GPU, or take a larger one"
        if self.drawing is not None and self.keeps_drawing and room + self.drawing.weights > 0:
            return "set execution.keep_renderer=false"
        if sampling:
            return f"the weights alone do not fit; {less_to_sample(config)}" if room <= 0 else _SHORTER
        if phase == "optimize" and not model.gradient_checkpointing:
            return "set model.gradient_checkpointing=true"
        if phase == "optimize" and execution.ranks > 1 and execution.strategy == "ddp":
            return "set execution.strategy=fsdp"
        if self.critic is not None and config.critic.backbone == "own":
            return "set critic.backbone=policy, or train adapters, model.lora={rank: 32, alpha: 64}"
        if model.lora is None:
            return "train adapters, model.lora={rank: 32, alpha: 64}"
        return "set model.dtype=bfloat16" if model.dtype == "float32" else _SHORTER


_SHORTER = "one row does not fit: lower rollout.tokens.max_new or max_prompt, or take a larger GPU"


def language_memory(
    config: RunConfig, requires: Requirements, optimizer: OptimizerSizes, *, reference: bool
) -> LanguageMemory | None:
    """Return the memory of a rank; None if the model's config is unknown (a model to build, or not published here).

    Args:
        config: the config.
        requires: its algorithm's needs.
        optimizer: sizes of its optimizer's state.
        reference: log-probs of the base model are needed.
    """
    quiet_libraries()
    about = None if config.model.path is None else language_config(config.model.path)
    if about is None:
        return None
    model, execution, estimator = config.model, config.execution, make_estimator(config)
    spec = lora_spec(config, resolve(POLICIES, model.policy, label="model.policy"))
    sizes = Sizes(config, optimizer, spec)
    module = meta_language_model(about)
    actor = sizes.role(module, block_lists(module), dtype=model.dtype, copies=int(config.optimize.ema is not None))
    critic = BesideMemory.of(config, about, sizes, spec) if requires.critic else BesideMemory()
    measured = TextFootprints(
        about, settings_of(config, model.dtype), spec, critic=critic.settings, own=config.critic.backbone == "own"
    )
    prompt, notes = _prompt_tokens(config, context_length(about))
    new = tokens_of(config).max_new
    width = Widths(most=prompt + new, limit=context_length(about)).of(prompt + new)
    sampled = measured.sampling(execution.rollout_batch_size, prompt=prompt, new=new)
    compared, stored = reference or estimator.needs_reference, estimator.needs_values or estimator.needs_reference
    drawing, drawing_notes = drawing_of(config)
    rows = execution.micro_batch_size
    frozen = frozen_bytes(module, BYTES[model.dtype]) // sizes.parts
    valuing = measured.valuing(rows, width, reference=estimator.needs_reference) if stored else None
    training = measured.training(rows, width, reference=reference and not estimator.needs_reference)
    apart = critic.apart(rows, width)
    return LanguageMemory(
        actor=actor,
        critic=critic.critic,
        critic_kind=critic.kind,
        reference=frozen if compared and spec is None else 0,
        reference_kind="" if not compared else "a frozen copy" if spec is None else "the actor, adapters off",
        drawing=drawing,
        keeps_drawing=execution.keep_renderer,
        tokens=width,
        cache=sampled.cache,
        sample=sampled.work,
        rescore=measured.scoring(min(execution.rollout_batch_size, rows), width) if tokens_of(config).rescore else 0,
        value=None if valuing is None else max(valuing, apart.value),
        optimize_activations=training + apart.training,
        host=sizes.host([role for role in (actor, critic.anywhere) if role is not None], model.dtype),
        notes=(*notes, *drawing_notes, *apart.notes),
    )


def _prompt_tokens(config: RunConfig, context: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of the longest prompt, and notes on their source."""
    section = tokens_of(config)
    splits = {split: [prompt.text for prompt in prompts] for split, prompts in source_prompts(config).items()}
    folder = Path(str(config.model.path)).expanduser()
    if folder.is_dir():
        return Prompts(load_tokenizer(folder), section, context).longest(splits), ()
    room = () if context is None else (context - section.max_new,)
    # A token of a byte-level tokenizer is at least one byte.
    longest = max(len(text.encode()) for texts in splits.values() for text in texts) + _TEMPLATE
    longest += sum(len(text.encode()) for text in (section.system, section.instruction) if text is not None)
    found = max(1, min(longest, *room, *(() if section.max_prompt is None else (section.max_prompt,))))
    return found, (
        f"memory: prompts are assumed to have up to {found} tokens, because the tokenizer is not here yet. "
        "rollout.tokens.max_prompt limits them.",
    )
