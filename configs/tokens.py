"""Settings of the texts that a causal language model samples."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field, field_validator

from flowmill.configs.base import Component, Later, Section

#: Placeholder of the prompt in an instruction.
_PLACE = "{prompt}"


class TokensSection(Section):
    """Sampling of texts. A model's ``generation_config`` is ignored: all options are set here."""

    max_new: int = Field(64, ge=1, le=1 << 16)
    """Maximum tokens of a completion."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits, both in sampling and in training."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the token that completes one is the last, and is trained."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Whether the prompt is formatted with the tokenizer's chat template as a user message; auto: if it has one."""
    system: str | None = None
    """System message before the prompt, with a chat template."""
    template_date: Annotated[date | None, Later()] = None
    """The date passed to a chat template that asks for one (`strftime_now`), such as 2024-07-26; such a template is
    refused without it."""
    instruction: Annotated[str | None, Later()] = None
    """Instruction that contains the prompt in place of {prompt}, such as "Rewrite for an image model: {prompt}"."""
    max_prompt: int | None = Field(None, ge=1, le=1 << 20)
    """Maximum tokens of a prompt; the model's limit when absent."""
    on_overlong: Literal["refuse", "cut_left"] = "refuse"
    """Treatment of a longer prompt: an error before any work, or its first tokens are dropped."""
    rescore: Annotated[bool, Later()] = True
    """Compute the stored log-probs with a forward over whole texts, bit for bit as in training. false omits it and
    stores the log-probs of sampling, which in float32 differ by about 1e-6."""
    engine: Component = Component(name="local")
    """Sampler of the tokens of rollouts: the policy itself, or a server (`openai`); evaluations always use the
    policy."""
    evaluate: Literal["greedy", "sampled"] = "greedy"
    """Evaluations take the most likely token, or sample with fixed seeds."""

    @field_validator("instruction")
    @classmethod
    def _has_a_place(cls, value: str | None) -> str | None:
        if value is not None and _PLACE not in value:
            raise ValueError(f"instruction has no {_PLACE}, so no prompt would be read: put it where the prompt goes")
        return value

    def instructed(self, prompt: str) -> str:
        """Return the prompt, inserted into the instruction if there is one."""
        return prompt if self.instruction is None else self.instruction.replace(_PLACE, prompt)
