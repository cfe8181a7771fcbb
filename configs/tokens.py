"""What a person may write about the texts a causal language model samples."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field, field_validator

from configs.base import Component, Later, Section

#: Stands in an instruction for the prompt.
_PLACE = "{prompt}"


class TokensSection(Section):
    """How texts are sampled. Every option is written out: none is filled from a model's ``generation_config``."""

    max_new: int = Field(64, ge=1, le=1 << 16)
    """Tokens of a completion at most."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits, in sampling and in training alike."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the token that completes one is the last, and is trained."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Whether the prompt goes through the tokenizer's chat template as a user's message; auto: where it has one."""
    system: str | None = None
    """System message before the prompt, with a chat template."""
    template_date: Annotated[date | None, Later()] = None
    """The date that a chat template is told which asks for one (`strftime_now`), as 2024-07-26; such a template is
    refused without it."""
    instruction: Annotated[str | None, Later()] = None
    """What is asked of a prompt, as "Rewrite for an image model: {prompt}": it stands where {prompt} is."""
    max_prompt: int | None = Field(None, ge=1, le=1 << 20)
    """Tokens of a prompt at most; what the model takes when absent."""
    on_overlong: Literal["refuse", "cut_left"] = "refuse"
    """What becomes of a longer prompt: an error before any work, or its first tokens are dropped."""
    rescore: Annotated[bool, Later()] = True
    """A forward over whole texts gives the log-probs that are stored, in the bits of training; false spares it and
    stores them as they were drawn, which in float32 differs by about 1e-6."""
    engine: Component = Component(name="local")
    """What draws the tokens of rollouts: the policy itself, or a server (`openai`); evaluations draw by themselves."""
    evaluate: Literal["greedy", "sampled"] = "greedy"
    """Evaluations take the likeliest token, or draw with fixed seeds."""

    @field_validator("instruction")
    @classmethod
    def _has_a_place(cls, value: str | None) -> str | None:
        if value is not None and _PLACE not in value:
            raise ValueError(f"instruction has no {_PLACE}, so no prompt would be read: put it where the prompt goes")
        return value

    def asked(self, prompt: str) -> str:
        """Return what the model is asked for a prompt."""
        return prompt if self.instruction is None else self.instruction.replace(_PLACE, prompt)
