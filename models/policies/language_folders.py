"""Folders of causal language models: what is read of them, and checked, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.libraries import read_json

_TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path, *, what: str = "model.path") -> Any:
    """Return a model's tokenizer.

    Args:
        folder: of a model.
        what: the setting that names it.

    Raises:
        ConfigError: the folder has none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{what} '{folder}' has no tokenizer that can be read: {error}. Save it beside the model with "
            "tokenizer.save_pretrained()."
        ) from None


def context_length_of(folder: Path) -> int | None:
    """Return the tokens that a folder's model takes at most, prompt and completion; None where there is no limit."""
    from transformers import AutoConfig

    return context_length(AutoConfig.from_pretrained(folder, local_files_only=True))


def context_length(config: Any) -> int | None:
    """Return what a model's config of transformers names as that."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None else int(found)


def check_vocabulary(folder: Path, *, what: str = "model.path") -> None:
    """Check that a folder's model has an embedding for every token of its tokenizer.

    Args:
        folder: of a model.
        what: the setting that names it.

    Raises:
        ConfigError: it has not.
    """
    from transformers import AutoConfig

    config, tokenizer = AutoConfig.from_pretrained(folder, local_files_only=True), load_tokenizer(folder)
    vocabulary, size = tokenizer.get_vocab(), getattr(config, "vocab_size", None)
    beyond = sorted(((number, token) for token, number in vocabulary.items() if size is not None and number >= size))
    if not beyond:
        return
    named = ", ".join(repr(token) for _, token in beyond[:5]) + (f" and {len(beyond) - 5} more" * (len(beyond) > 5))
    found = (
        f"{what} '{folder}' has a tokenizer with ids up to {beyond[-1][0]}, but its model has {size} embeddings, so "
        "some prompts could not be read"
    )
    written = written_tokens(folder)
    if written and not any(token in written for _, token in beyond):
        raise ConfigError(
            f"{found}. The files do not hold {named}: the class {type(tokenizer).__name__} adds what it takes for "
            "granted when it is loaded. Save the tokenizer as a class that adds nothing, transformers."
            f"PreTrainedTokenizerFast(tokenizer_file='{folder / _TOKENIZER}', eos_token=...)"
            f".save_pretrained('{folder}') with tokens that are there, or give the model embeddings for them with "
            f"model.resize_token_embeddings({beyond[-1][0] + 1}) and save it."
        )
    raise ConfigError(
        f"{found}: the tokens are {named}. Save the tokenizer that belongs to the model, or give the model embeddings "
        f"for them with model.resize_token_embeddings({beyond[-1][0] + 1})."
    )


def written_tokens(folder: Path) -> set[str]:
    """Return the tokens in a folder's ``tokenizer.json``, empty where there is none that can be read."""
    try:
        found = read_json(folder / _TOKENIZER)
        listed, vocabulary = found.get("added_tokens") or [], (found.get("model") or {}).get("vocab") or {}
        tokens = vocabulary if isinstance(vocabulary, dict) else [each[0] for each in vocabulary]
        return {*map(str, tokens), *(str(each["content"]) for each in listed)}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return set()


def check_critic(folder: Path, policy: Path) -> None:
    """Check that a critic's model reads the tokens a policy writes.

    Args:
        folder: of the model that the critic begins as.
        policy: of the base model.

    Raises:
        ConfigError: it is no language model, or its tokenizer is another.
    """
    check_folder(folder, what="critic.path")
    own, written = (load_tokenizer(each, what=what) for each, what in ((folder, "critic.path"), (policy, "model.path")))
    tokens, found = written.get_vocab(), own.get_vocab()
    strange = next((token for token, number in sorted(tokens.items()) if found.get(token) != number), None)
    if strange is not None:
        has = f"the id {found[strange]}" if strange in found else "no id"
        raise ConfigError(
            f"critic.path '{folder}' has a tokenizer that gives {strange!r} {has}, but to that of the policy, "
            f"'{policy}', it is {tokens[strange]}: the critic would value other words than were written. "
            "Choose a model with the policy's tokenizer, or remove critic.path."
        )
    check_vocabulary(folder, what="critic.path")


def check_folder(folder: Path, *, what: str = "model.path") -> None:
    """Check that a folder holds a causal language model.

    Args:
        folder: of a model.
        what: the setting that names it.

    Raises:
        ConfigError: it does not.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{what} '{folder}' holds no config.json; it is no folder of a transformers model. Write one with "
            "model.save_pretrained() and tokenizer.save_pretrained()."
        )
    classes: Sequence[str] = read_json(path).get("architectures") or ()
    if classes and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        raise ConfigError(
            f"{what} '{folder}' holds a {', '.join(classes)}, but model.policy 'causal_lm' needs a causal language "
            "model (...ForCausalLM). Choose another model."
        )


def check_causal(folder: Path, model: Any, *, what: str = "model.path") -> None:
    """Check that a loaded model reads no later token: log-probs and values would be of tokens that it has seen.

    Args:
        folder: that it was loaded from.
        model: of transformers.
        what: the setting that names it.

    Raises:
        ConfigError: it reads texts both ways, as encoders do whose class has a language head (BERT's without
            ``is_decoder``).
    """
    decoder = getattr(model.config, "is_decoder", True)
    if not decoder and not any(getattr(module, "is_causal", False) for module in model.modules()):
        raise ConfigError(
            f"{what} '{folder}' holds a {type(model).__name__} that reads texts both ways (is_decoder is {decoder}), "
            "so that what it says of a token would be said with that token seen. Choose a causal language model."
        )
