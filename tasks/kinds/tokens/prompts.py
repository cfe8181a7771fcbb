"""Prompts as token ids: never rendered to text and tokenized again, so that no special token appears twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from configs.errors import ConfigError
from configs.tokens import TokensSection
from models.maths.tokens import Widths
from models.policies.language_folders import CONTEXT, context_length_of, load_tokenizer
from tasks.inputs.components import tokens_of

if TYPE_CHECKING:
    from models.policies.causal_lm import CausalLM
    from tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run as token ids, and what they decide of the shapes of its batches.

    What a row's padding is changes its bits, so widths are those of the run and not of what a batch happens to hold.
    """

    prompts: Prompts
    """Gives the ids of each."""
    longest: int
    """Tokens of the longest."""
    context: int | None
    """Tokens that the model takes at most."""

    @property
    def widths(self) -> Widths:
        """Widths of the run's batches."""
        return Widths(most=self.longest + self.prompts.section.max_new, limit=self.context)


#: Read once for each run of this process.
_READ: WeakKeyDictionary[RunContext, RunPrompts] = WeakKeyDictionary()


def read_prompts(context: RunContext, policy: CausalLM | None = None) -> RunPrompts:
    """Return the prompts of a run, read with its model's tokenizer.

    Args:
        context: the run.
        policy: has the tokenizer; None: it is read from the base model's folder, where that was not done yet.

    Raises:
        ConfigError: one cannot be taken, see ``Prompts.ids``.
    """
    found = _READ.get(context)
    if found is None:
        folder = context.base_folder
        tokenizer = load_tokenizer(folder) if policy is None else policy.tokenizer
        limit = context_length_of(folder)
        prompts = Prompts(tokenizer, tokens_of(context.config), limit)
        everything = (prompt.text for split in ("train", "heldout") for prompt in context.prompts[split])
        found = _READ[context] = RunPrompts(prompts, prompts.longest(everything), limit)
    return found


class Prompts:
    """Token ids of prompts, cut or refused where they are too long."""

    def __init__(self, tokenizer: Any, section: TokensSection, context_length: int | None) -> None:
        """Bind to a tokenizer.

        Args:
            tokenizer: of transformers.
            section: how texts are sampled.
            context_length: tokens the model takes, prompt and completion; None: no limit is known.

        Raises:
            ConfigError: a template is asked for that the tokenizer does not have, or nothing is left for a prompt.
        """
        self._tokenizer, self.section = tokenizer, section
        self.chat = section.template == "chat" or (
            section.template == "auto" and getattr(tokenizer, "chat_template", None) is not None
        )
        if section.system is not None and not self.chat:
            raise ConfigError(
                "rollout.tokens.system is set, but prompts go through no chat template. Set rollout.tokens.template to "
                "'chat', or remove it."
            )
        room = None if context_length is None else context_length - section.max_new
        if room is not None and room < 1:
            raise ConfigError(
                f"rollout.tokens.max_new is {section.max_new}, but the model takes {context_length} tokens in all, so "
                f"no prompt fits ({CONTEXT}). Lower it."
            )
        limits = [limit for limit in (section.max_prompt, room) if limit is not None]
        self.limit = min(limits) if limits else None
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the ids of a prompt, at least one.

        Raises:
            ConfigError: it is too long and may not be cut, it is empty, or the template fails.
        """
        if text not in self._known:
            self._known[text] = self._fitting(text)
        return self._known[text]

    def messages(self, asked: str) -> list[tuple[str, str]]:
        """Return what a chat begins with, as roles and texts."""
        said = [] if self.section.system is None else [("system", self.section.system)]
        return [*said, ("user", asked)]

    def longest(self, texts: Iterable[str]) -> int:
        """Return the tokens of the longest of some prompts.

        Raises:
            ConfigError: one cannot be taken, see ``ids``.
        """
        return max(len(self.ids(text)) for text in texts)

    def _fitting(self, text: str) -> list[int]:
        found = self._rendered(text)
        if not found:
            raise ConfigError(f"prompt {text[:60]!r} has no token. Remove it, or use a chat template.")
        if self.limit is None or len(found) <= self.limit:
            return found
        if self.section.on_overlong == "cut_left":
            return found[-self.limit :]
        raise ConfigError(
            f"prompt {text[:60]!r} has {len(found)} tokens, but at most {self.limit} fit (rollout.tokens.max_prompt, "
            f"and what the model takes, {CONTEXT}, less rollout.tokens.max_new). Shorten it, lower max_new, or set "
            "rollout.tokens.on_overlong to 'cut_left'."
        )

    def _rendered(self, text: str) -> list[int]:
        if not self.chat:
            return [int(token) for token in self._tokenizer(self.section.asked(text)).input_ids]
        messages = [{"role": role, "content": said} for role, said in self.messages(self.section.asked(text))]
        try:
            found = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            raise ConfigError(
                f"the tokenizer's chat template fails for prompt {text[:60]!r}: {error}. Set rollout.tokens.template "
                "to 'none', or mend the template."
            ) from error
        return [int(token) for token in found]
