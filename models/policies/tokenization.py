"""Token limits of a family's text encoders, and notes on truncated prompts, where libraries only warn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError, listed
from flowmill.models.text.chat_templates import guard_template
from flowmill.models.text.control_tokens import first_mark
from flowmill.models.weights.pretrained_loading import load_pretrained


def as_message(**options: Any) -> Callable[[Any, str], Any]:
    """Return a function that writes a prompt as the user's message of a tokenizer's chat template with options."""

    def written(tokenizer: Any, text: str) -> Any:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One tokenizer of a pipeline, and its limit and template of prompts."""

    tokenizer: str
    """Name of its component."""
    limit: int | None = None
    """Tokens that are read; None: ``max_sequence_length``."""
    further: int = 0
    """Tokens of a template that are read in addition and then dropped."""
    most: int | None = None
    """Upper bound of ``max_sequence_length``."""
    written: Callable[[Any, str], Any] = lambda tokenizer, text: text
    """Inserts a prompt into a template; returns text or tokens."""

    def count(self, tokenizer: Any, text: str) -> int:
        """Return the number of tokens of a prompt with its template."""
        written = self.written(tokenizer, text)
        return len(tokenizer(written)["input_ids"] if isinstance(written, str) else written)

    def limit_of(self, options: Any) -> int:
        """Return the number of tokens that are read under the family's options."""
        length = self.limit or options.max_sequence_length
        return int(min(length, self.most or length)) + self.further


#: Tokens that CLIP reads under any settings.
CLIP_LIMIT = 77


def cut_notes(
    readers: Sequence[Reader], tokenizers: Mapping[str, Any], options: Any, texts: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence for each tokenizer that truncates prompts: their number, the limit, and the longest prompt.
    ``tokenizers``: by component; None or missing if the model has none."""
    for reader in readers:
        tokenizer = tokenizers.get(reader.tokenizer)
        if tokenizer is None:
            continue
        limit, empty = reader.limit_of(options), reader.count(tokenizer, "")
        # A text has at most as many tokens as bytes, so most prompts need not be tokenized.
        long = [text for text in texts if empty + len(text.encode()) + 2 > limit]
        counted = [(reader.count(tokenizer, text), text) for text in long]
        cut = [one for one in counted if one[0] > limit]
        if cut:
            most, text = max(cut)
            raised = "" if reader.limit is not None else ", which model.options.max_sequence_length sets"
            yield (
                f"{len(cut)} of {len(texts)} prompts are cut off: '{reader.tokenizer}' reads {limit} tokens{raised}, "
                f"and the longest has {most} ({text[:40]!r}...). That encoder does not see the rest."
            )


def refusal(text: str, mark: str) -> str:
    """Return the message that refuses a prompt with a control token."""
    return (
        f"prompt {text[:60]!r} holds {mark!r}, which a text encoder of the model reads as a control token: it might "
        "not see the text after it. Write it in another way, or remove the prompt."
    )


def load_tokenizers(folder: Path, readers: Sequence[Reader]) -> dict[str, Any]:
    """Return the tokenizers of a local pipeline folder, without loading its models."""
    return _loaded(folder, [reader.tokenizer for reader in readers if (folder / reader.tokenizer).is_dir()])


def check_marks(folder: Path, texts: Iterable[str]) -> None:
    """Check that prompts hold no control token of a local pipeline folder's tokenizers; raise ConfigError."""
    # Control tokens of all supported tokenizers start with one of these, so most prompt lists need no tokenizer.
    suspect = [text for text in texts if any(sign in text for sign in "<[{|")]
    names = sorted(path.parent.name for path in folder.glob("*/tokenizer_config.json")) if suspect else []
    tokenizers = list(_loaded(folder, names).values())
    marks = ((text, next(filter(None, (first_mark(each, text) for each in tokenizers)), None)) for text in suspect)
    if reasons := [refusal(text, mark) for text, mark in marks if mark is not None]:
        raise ConfigError(listed(reasons))


def _loaded(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizers = {name: load_pretrained(AutoTokenizer, folder / name, label="model.path") for name in names}
    for tokenizer in tokenizers.values():
        guard_template(tokenizer)
    return tokenizers
