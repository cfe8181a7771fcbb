"""Folders of causal language models: reading and checking their files before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import read_json
from flowmill.models.weights.complete import check_complete
from flowmill.models.weights.pretrained_loading import check_model_folder, load_pretrained

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModels:
    """The model classes of a family."""

    policy: str
    """The family's name in the table."""
    auto: str
    """The class of transformers that loads them."""
    label: str
    """Their name in messages."""
    names: tuple[str, ...]
    """Ends of the names of their classes."""
    reader: str
    """The class of transformers that reads their prompts."""
    task: str
    """Their task on the hub."""
    draws: bool = False
    """Whether the tokens of an image follow a prompt, which then has those of ``frame_of`` around it."""
    generation: tuple[str, ...] = ()
    """Settings of a generation config that exports keep, besides tokens that start, end and pad texts."""

    def loader(self) -> Any:
        """Return the class of transformers."""
        import transformers

        return getattr(transformers, self.auto)


CAUSAL = LanguageModels(
    policy="causal_lm",
    auto="AutoModelForCausalLM",
    label="a causal language model (...ForCausalLM)",
    names=("ForCausalLM", "LMHeadModel"),
    reader="AutoTokenizer",
    task="text-generation",
)
"""Models of texts."""


class Frame(NamedTuple):
    """The tokens around a prompt that an image follows, and the one that replaces its own in a row without a prompt."""

    first: int
    last: int
    blank: int

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt's ids with both; the first may be there."""
        return [*([] if ids[:1] == [self.first] else [self.first]), *ids, self.last]


def hidden_size(config: Any) -> int:
    """Return the width of a language model's hidden states."""
    return int(config.get_text_config(decoder=True).hidden_size)


def load_tokenizer(folder: Path, *, label: str = "model.path") -> Any:
    """Return a model's tokenizer; raise ConfigError if the folder has no readable tokenizer."""
    from transformers import AutoTokenizer

    remedy = "Save a tokenizer next to the model with tokenizer.save_pretrained()."
    return load_pretrained(AutoTokenizer, folder, label=f"{label}: the tokenizer of", remedy=remedy)


def load_language_config(folder: Path, *, label: str = "model.path") -> Any:
    """Return a model's transformers config; raise ConfigError if the folder has no readable config."""
    from transformers import AutoConfig

    return load_pretrained(AutoConfig, folder, label=label)


#: Source of a model's context length, for messages.
CONTEXT = "max_position_embeddings, or the length of the first of two rotary tables (rope_type 'longrope')"


def context_length_of(folder: Path) -> int | None:
    """Return the maximum tokens, prompt and completion, of a folder's model; None if there is no limit."""
    return context_length(load_language_config(folder))


def context_length(config: Any) -> int | None:
    """Return the maximum tokens that a model's transformers config names, or None. With two rotary tables
    (``longrope``), the limit is the length of the first: a cache keeps keys rotated by the first table when the second
    takes over, unlike a forward over a whole row."""
    config = config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    lengths = [*([] if length is None else [int(length)]), *_first_tables(config)]
    return min(lengths, default=None)


def _first_tables(config: Any) -> list[int]:
    """Return the lengths of a config's rotary tables that are replaced by another for longer rows."""
    stated = getattr(config, "rope_parameters", None) or {}
    tables = [stated, *(each for each in stated.values() if isinstance(each, Mapping))]
    usual = getattr(config, "original_max_position_embeddings", None)
    lengths = [each.get("original_max_position_embeddings") or usual for each in tables if two_tables(each)]
    return [int(length) for length in lengths if length]


def two_tables(table: Mapping[str, Any]) -> bool:
    """Return whether transformers' rotary parameters define two tables, chosen by the length of the row."""
    return bool(table.get("rope_type", table.get("type")) == "longrope")


def read_generation_config(folder: Path, model: Any) -> Any:
    """Return the generation config that ``from_pretrained`` of a model would read; without a file, the model's own."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return model.generation_config
    return load_pretrained(GenerationConfig, folder, label="model.path: the generation config of")


def end_tokens(*configs: Any) -> tuple[int, ...]:
    """Return the end tokens that transformers configs, or a tokenizer, name, in order."""
    named = (getattr(each, "eos_token_id", None) for each in configs)
    flat = (token for each in named for token in (each if isinstance(each, list | tuple) else [each]))
    return tuple(dict.fromkeys(int(token) for token in flat if token is not None))


def stated_ends(folder: Path) -> tuple[int, ...]:
    """Return the end tokens that the configs in a model's folder name."""
    from transformers import GenerationConfig

    config = load_language_config(folder)
    configs = [config, config.get_text_config(decoder=True)]
    if (folder / "generation_config.json").is_file():
        configs.insert(0, load_pretrained(GenerationConfig, folder, label="model.path: the generation config of"))
    return end_tokens(*configs)


def add_template(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer the chat template of its processor, where that has a file of its own, as of transformers 4."""
    file = folder / "chat_template.json"
    if getattr(tokenizer, "chat_template", None) is None and file.is_file():
        tokenizer.chat_template = read_json(file).get("chat_template")


def frame_of(folder: Path) -> Frame:
    """Return the tokens around a prompt of a folder's model; raise ConfigError if its files do not name them."""
    from transformers import GenerationConfig

    generation = load_pretrained(GenerationConfig, folder, label="model.path: the generation config of")
    last = (getattr(generation, "generation_kwargs", None) or {}).get("boi_token_id")
    ids = [token for token in (generation.bos_token_id, last, generation.pad_token_id) if isinstance(token, int)]
    if len(ids) != 3:
        raise ConfigError(
            f"model.path '{folder}' has a generation_config.json without bos_token_id, pad_token_id or "
            "generation_kwargs.boi_token_id, which are put around prompts of images. Take a folder of transformers' "
            "Janus, such as deepseek-community/Janus-Pro-1B."
        )
    return Frame(*ids)


def check_vocabulary(folder: Path, *, label: str = "model.path") -> None:
    """Check that a folder's model has an embedding for every token of its tokenizer; raise ConfigError if an embedding
    is missing."""
    config, tokenizer = load_language_config(folder, label=label), load_tokenizer(folder, label=label)
    vocabulary, size = tokenizer.get_vocab(), getattr(config.get_text_config(decoder=True), "vocab_size", None)
    beyond = sorted(((number, token) for token, number in vocabulary.items() if size is not None and number >= size))
    if not beyond:
        return
    named = ", ".join(repr(token) for _, token in beyond[:5]) + (f" and {len(beyond) - 5} more" * (len(beyond) > 5))
    fault = (
        f"{label} '{folder}' has a tokenizer with ids up to {beyond[-1][0]}, but its model has {size} embeddings, so "
        "some prompts could not be read"
    )
    written = written_tokens(folder)
    if written and not any(token in written for _, token in beyond):
        raise ConfigError(
            f"{fault}. The files do not hold {named}: the class {type(tokenizer).__name__} adds its default tokens "
            "when it is loaded. Save the tokenizer as a class that adds nothing, transformers."
            f"PreTrainedTokenizerFast(tokenizer_file='{folder / _TOKENIZER}', eos_token=...)"
            f".save_pretrained('{folder}') with tokens that are there, or give the model embeddings for them with "
            f"model.resize_token_embeddings({beyond[-1][0] + 1}) and save it."
        )
    raise ConfigError(
        f"{fault}: the tokens are {named}. Save the tokenizer that belongs to the model, or give the model embeddings "
        f"for them with model.resize_token_embeddings({beyond[-1][0] + 1})."
    )


def written_tokens(folder: Path) -> set[str]:
    """Return the tokens in a folder's ``tokenizer.json``; empty if it is missing or unreadable."""
    try:
        content = read_json(folder / _TOKENIZER)
        listed, vocabulary = content.get("added_tokens") or [], (content.get("model") or {}).get("vocab") or {}
        tokens = vocabulary if isinstance(vocabulary, dict) else [each[0] for each in vocabulary]
        return {*map(str, tokens), *(str(each["content"]) for each in listed)}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return set()


def check_critic(folder: Path, policy: Path, models: LanguageModels = CAUSAL) -> None:
    """Check that a critic's model has the tokenizer of the policy; raise ConfigError if it is not a language model, or
    its tokenizer differs."""
    check_folder(folder, models, label="critic.path")
    own, written = (
        load_tokenizer(each, label=label) for each, label in ((folder, "critic.path"), (policy, "model.path"))
    )
    tokens, vocabulary = written.get_vocab(), own.get_vocab()
    strange = next((token for token, number in sorted(tokens.items()) if vocabulary.get(token) != number), None)
    if strange is not None:
        has = f"the id {vocabulary[strange]}" if strange in vocabulary else "no id"
        raise ConfigError(
            f"critic.path '{folder}' has a tokenizer that gives {strange!r} {has}, but to that of the policy, "
            f"'{policy}', it is {tokens[strange]}: the critic would value other words than were written. "
            "Choose a model with the policy's tokenizer, or remove critic.path."
        )
    check_vocabulary(folder, label="critic.path")


def check_folder(folder: Path, models: LanguageModels = CAUSAL, *, label: str = "model.path") -> None:
    """Check that a folder holds a model of some classes; raise ConfigError."""
    check_model_folder(folder, label=label)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{label} '{folder}' holds no config.json; it is no folder of a transformers model. Write one with "
            "model.save_pretrained() and tokenizer.save_pretrained()."
        )
    classes: Sequence[str] = read_json(path).get("architectures") or ()
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(
            f"{label} '{folder}': architectures in its config.json is {classes!r}, not a list of classes."
        )
    if classes and not any(name.endswith(models.names) for name in classes):
        raise ConfigError(
            f"{label} '{folder}' holds a {', '.join(classes)}, but model.policy '{models.policy}' needs "
            f"{models.label}. Choose another model."
        )
    try:
        check_complete(folder, models.loader(), label=label)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{label} '{folder}' cannot be loaded: {str(error)[:300]}. Save it again.") from None
