"""Prompts as token ids; special tokens come only from the tokenizer and its template, never from a prompt's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from configs.errors import ConfigError
from configs.tokens import TokensSection
from models.maths.shared_prompts import SharedWidths
from models.maths.tokens import Widths
from models.policies.language_model_folders import CONTEXT, context_length_of, load_tokenizer
from models.text.chat_templates import render_chat, told_dates
from models.text.control_tokens import chat_ids, first_mark, marked, plain_ids
from tasks.inputs.components import tokens_of

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from models.policies.causal_lm import CausalLM
    from tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run as token ids, and the widths of its batches.

    A row's padding changes its rounding, so widths depend on the run and not on the rows of a batch.
    """

    prompts: Prompts
    """Converts prompts to ids."""
    longest: int
    """Tokens of the longest prompt."""
    context: int | None
    """Maximum tokens of the model."""
    members: int | None
    """Texts of a group that share the tokens of their prompt; None: they do not."""

    @property
    def shared(self) -> SharedWidths | None:
        """Widths of the run's packed rows, if texts share prompts."""
        if self.members is None:
            return None
        most = self.prompts.section.max_new
        return SharedWidths(prompt=self.longest, completion=most, members=self.members)

    @property
    def widths(self) -> Widths:
        """Widths of the run's batches."""
        return Widths(most=self.longest + self.prompts.section.max_new, limit=self.context)


def shared_members(config: RunConfig) -> int | None:
    """Return the texts of a group that share the tokens of their prompt; None: they do not."""
    return config.samples_per_group if config.optimize.shared_prompts else None


#: Caches of each run in this process.
_READ: WeakKeyDictionary[RunContext, RunPrompts] = WeakKeyDictionary()
_PROMPTS: WeakKeyDictionary[RunContext, Prompts] = WeakKeyDictionary()


def prompts_of(context: RunContext, policy: CausalLM | None = None) -> Prompts:
    """Return the tokenizer and settings of a run's prompts, of which none is read; see ``read_prompts``."""
    found = _PROMPTS.get(context)
    if found is None:
        folder = context.base_folder
        tokenizer = load_tokenizer(folder) if policy is None else policy.tokenizer
        found = _PROMPTS[context] = Prompts(tokenizer, tokens_of(context.config), context_length_of(folder))
    return found


def read_prompts(context: RunContext, policy: CausalLM | None = None) -> RunPrompts:
    """Return the prompts of a run, read with its model's tokenizer.

    Args:
        context: the run.
        policy: holds the tokenizer; None: it is read from the base model's folder, if not cached.

    Raises:
        ConfigError: a prompt is invalid, see ``Prompts.ids``.
    """
    found = _READ.get(context)
    if found is None:
        prompts = prompts_of(context, policy)
        everything = {split: [prompt.text for prompt in context.prompts[split]] for split in ("train", "heldout")}
        limit, shared = context_length_of(context.base_folder), shared_members(context.config)
        found = _READ[context] = RunPrompts(prompts, prompts.longest(everything), limit, shared)
    return found


class Prompts:
    """Token ids of prompts, which are cut or refused if they are too long."""

    def __init__(self, tokenizer: Any, section: TokensSection, context_length: int | None) -> None:
        """Bind to a tokenizer.

        Args:
            tokenizer: a transformers tokenizer.
            section: settings of text sampling.
            context_length: maximum tokens of prompt and completion; None: no known limit.

        Raises:
            ConfigError: the tokenizer lacks the requested template, or no tokens are left for a prompt.
        """
        self.tokenizer, self.section = tokenizer, section
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
        self.ends = 0 if self.chat else _end_tokens(tokenizer)
        """End tokens that the tokenizer appends to a text; they are removed because a completion follows."""
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the ids of a prompt, at least one.

        Raises:
            ConfigError: it is too long and may not be cut, it is empty, it holds a control token that cannot be
                tokenized as text, or the template fails.
        """
        if text not in self._known:
            self._known[text] = self.fitting(text)
        return self._known[text]

    def completion(self, text: str) -> list[int]:
        """Return the ids of a given completion, which ends with the tokenizer's end token.

        Raises:
            ConfigError: it is too long, or holds a control token that cannot be tokenized as text.
        """
        mark = first_mark(self.tokenizer, text)
        if mark is None:
            found = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            found = plain_ids(self.tokenizer, text)
        if found is None:
            raise ConfigError(f"it holds {mark!r}, which the tokenizer cannot read as text. Write it in another way.")
        end, most = self.tokenizer.eos_token_id, self.section.max_new
        ids = [int(token) for token in (*found, *(() if end is None else (end,)))]
        if len(ids) > most:
            raise ConfigError(
                f"it has {len(ids)} tokens, but rollout.tokens.max_new is {most}. Raise it, or shorten it."
            )
        return ids

    def messages(self, asked: str) -> list[tuple[str, str]]:
        """Return the first messages of a chat, as (role, text) pairs."""
        system = [] if self.section.system is None else [("system", self.section.system)]
        return [*system, ("user", asked)]

    def told_dates(self, asked: str) -> dict[str, str]:
        """Return the dates that the template requests, by format."""
        messages = [{"role": role, "content": text} for role, text in self.messages(asked)]
        day = self.section.template_date
        return {} if day is None else told_dates(self.tokenizer, messages, day)

    def longest(self, splits: Mapping[str, Sequence[str]]) -> int:
        """Return the tokens of the longest prompt, of lists by split.

        Raises:
            ConfigError: a prompt is invalid, see ``ids``.
        """
        return max(
            self._counted(split, row, text) for split, texts in splits.items() for row, text in enumerate(texts, 1)
        )

    def _counted(self, split: str, row: int, text: str) -> int:
        try:
            return len(self.ids(text))
        except ConfigError as error:
            raise ConfigError(f"prompts.{split}, number {row}: {error}") from None

    def fitting(self, text: str) -> list[int]:
        """Return the ids of a prompt, which are not kept; see ``ids``."""
        found = self._rendered(text)
        if not found:
            raise ConfigError(f"prompt {text[:60]!r} has no token. Remove it, or use a chat template.")
        if self.limit is None or len(found) <= self.limit:
            return found
        if self.section.on_overlong == "cut_left":
            return found[-self.limit :]
        raise ConfigError(
            f"prompt {text[:60]!r} has {len(found)} tokens, but at most {self.limit} fit (rollout.tokens.max_prompt, "
            f"and the model's limit, {CONTEXT}, less rollout.tokens.max_new). Shorten it, lower max_new, or set "
            "rollout.tokens.on_overlong to 'cut_left'."
        )

    def _rendered(self, text: str) -> list[int]:
        prompt = self.section.asked(text)
        mark = first_mark(self.tokenizer, prompt)
        if self.chat:
            found = self._chat(text, prompt) if mark is None else self._marked_chat(text, prompt)
        elif mark is None:
            found = [int(token) for token in self.tokenizer(prompt).input_ids]
        else:
            found = plain_ids(self.tokenizer, prompt)
        if found is None:
            raise ConfigError(
                f"prompt {text[:60]!r} holds {mark!r}, which the tokenizer reads as a control token and cannot read as "
                "text: the prompt would end, or change who speaks. Write it in another way, or remove the prompt."
            )
        return found[: len(found) - self.ends]

    def _chat(self, text: str, prompt: str) -> list[int]:
        chat = self.render(text, self.messages(prompt))
        return [int(token) for token in self.tokenizer(chat, add_special_tokens=False).input_ids]

    def _marked_chat(self, text: str, prompt: str) -> list[int] | None:
        roles, texts = zip(*self.messages(prompt), strict=True)
        marks, between = marked(self.tokenizer, texts)
        return chat_ids(self.tokenizer, self.render(text, list(zip(roles, marks, strict=True))), between)

    def render(self, text: str, messages: Sequence[tuple[str, str]], *, generate: bool = True) -> str:
        """Return messages, (role, text) pairs, rendered by the template.

        Args:
            text: the prompt, for errors.
            messages: the messages.
            generate: end with the beginning of an answer.

        Raises:
            ConfigError: the template fails, or reads the clock.
        """
        try:
            return render_chat(
                self.tokenizer,
                [{"role": role, "content": content} for role, content in messages],
                setting="rollout.tokens.template_date",
                day=self.section.template_date,
                generate=generate,
            )
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the tokenizer's chat template fails for prompt {text[:60]!r}: {error}. Set rollout.tokens.template "
                "to 'none', or mend the template."
            ) from error


def _end_tokens(tokenizer: Any) -> int:
    """Return the number of end tokens (end of text, or of a part) that a tokenizer appends to every text."""
    ends = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {None}
    written = list(tokenizer("a").input_ids)
    count = 0
    while count < len(written) and written[-1 - count] in ends:
        count += 1
    return count
