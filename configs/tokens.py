"""What a person may write about the texts a causal language model samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Component, Section


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
    max_prompt: int | None = Field(None, ge=1, le=1 << 20)
    """Tokens of a prompt at most; what the model takes when absent."""
    on_overlong: Literal["refuse", "cut_left"] = "refuse"
    """What becomes of a longer prompt: an error before any work, or its first tokens are dropped."""
    engine: Component = Component(name="local")
    """What draws the tokens of rollouts: the policy itself, or a server (`openai`); evaluations draw by themselves."""
    evaluate: Literal["greedy", "sampled"] = "greedy"
    """Evaluations take the likeliest token, or draw with fixed seeds."""
