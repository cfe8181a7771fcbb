"""How many tokens of a prompt a family's text encoders read: what is longer is cut off, where libraries only warn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.text.chat_templates import guard_template
from models.text.control_tokens import first_mark
from models.weights.pretrained_loading import load_pretrained


def _plain(tokenizer: Any, text: str) -> Any:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One tokenizer of a pipeline, and how a prompt is put to it."""

    tokenizer: str
    """Its component."""
    limit: int | None = None
    """Tokens that are read; None: as many as ``max_sequence_length`` says."""
    further: int = 0
    """Tokens of a template that are read beside so many, and dropped."""
    most: int | None = None
    """The most ``max_sequence_length`` can mean."""
    written: Callable[[Any, str], Any] = _plain
    """Puts a prompt into a template: text, or the tokens themselves."""

    def count(self, tokenizer: Any, text: str) -> int:
        """Return how many tokens a prompt has, those of its template among them."""
        written = self.written(tokenizer, text)
        return len(tokenizer(written)["input_ids"] if isinstance(written, str) else written)

    def limit_of(self, options: Any) -> int:
        """Return how many tokens are read under the options of a family."""
        length = self.limit or options.max_sequence_length
        return int(min(length, self.most or length)) + self.further


#: CLIP reads so many tokens, whatever else is set.
CLIP_LIMIT = 77


def cut_notes(
    readers: Sequence[Reader], tokenizers: Mapping[str, Any], options: Any, texts: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence for each tokenizer that cuts prompts off: how many, where, and the longest.

    Args:
        readers: of the family.
        tokenizers: by component; those a model does not have are left out.
        options: of the family.
        texts: prompts.
    """
    for reader in readers:
        tokenizer = tokenizers.get(reader.tokenizer)
        if tokenizer is None:
            continue
        limit, empty = reader.limit_of(options), reader.count(tokenizer, "")
        # No tokenizer makes more tokens of a text than it has bytes; most prompts need not be counted.
        long = [text for text in texts if empty + len(text.encode()) + 2 > limit]
        counted = [(reader.count(tokenizer, text), text) for text in long]
        cut = [one for one in counted if one[0] > limit]
        if cut:
            most, text = max(cut)
            raised = "" if reader.limit is not None else ", which model.options.max_sequence_length sets"
            yield (
                f"{len(cut)} of {len(texts)} prompts are cut off: '{reader.tokenizer}' reads {limit} tokens{raised}, "
                f"and the longest has {most} ({text[:40]!r}...). What comes after is not seen by that encoder."
            )


def refusal(text: str, mark: str) -> str:
    """Return why a prompt with a control token is not encoded, and what to do."""
    return (
        f"prompt {text[:60]!r} holds {mark!r}, which a text encoder of the model reads as a control token: what comes "
        "after might not be seen. Write it in another way, or remove the prompt."
    )


def load_tokenizers(folder: Path, readers: Sequence[Reader]) -> dict[str, Any]:
    """Return the tokenizers of a local pipeline folder, without anything else of it."""
    return _loaded(folder, [reader.tokenizer for reader in readers if (folder / reader.tokenizer).is_dir()])


def check_marks(folder: Path, texts: Iterable[str]) -> None:
    """Check that prompts hold no control token of the tokenizers of a local pipeline folder.

    Raises:
        ConfigError: one does.
    """
    # Control tokens of all tokenizers in use begin with one of these; most lists need no tokenizer to be loaded.
    suspect = [text for text in texts if any(sign in text for sign in "<[{|")]
    names = sorted(path.parent.name for path in folder.glob("*/tokenizer_config.json")) if suspect else []
    for tokenizer in _loaded(folder, names).values():
        for text in suspect:
            if (mark := first_mark(tokenizer, text)) is not None:
                raise ConfigError(refusal(text, mark))


def _loaded(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    found = {name: load_pretrained(AutoTokenizer, folder / name, label="model.path") for name in names}
    for tokenizer in found.values():
        guard_template(tokenizer)
    return found
