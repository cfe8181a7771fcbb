"""Causal language models and critics without weights, from the config of a folder or of a published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.user_directories import user_path
from flowmill.models.memory.published import published
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import ValueModel
from flowmill.models.policies.language_classes import attention_of, check_causal, check_shares_prompts
from flowmill.models.policies.language_model_folders import CAUSAL, LanguageModels, hidden_size, load_language_config
from flowmill.models.weights.pretrained_loading import auto_from_config
from flowmill.models.weights.stored_weights import on_meta


def language_config(path: str) -> Any:
    """Return the transformers config of a model's folder or a published model, None for any other path."""
    from transformers import AutoConfig

    folder = user_path(path)
    if folder.is_dir():
        return load_language_config(folder)
    fields = published("language").get(path)
    return None if fields is None else AutoConfig.for_model(**fields)


def meta_language_model(config: Any, attention: str | None = None, models: LanguageModels | None = CAUSAL) -> Any:
    """Return the language model without weights.

    Args:
        config: config of transformers.
        attention: ``model.attention``.
        models: its classes; None: it is the backbone of a critic.
    """
    from transformers import AutoModel

    loader, label = (AutoModel, "critic.path") if models is None else (models.loader(), "model.path")
    called = attention_of(loader, config, attention, label=label)
    return on_meta(lambda: auto_from_config(loader, config, attn_implementation=called))


def meta_critic(config: Any, *, own: bool) -> ValueModel:
    """Return the critic of a model without weights: with its own backbone, or only a head."""
    backbone = meta_language_model(config, models=None) if own else None
    return ValueModel(backbone, hidden_size(config), torch.device("meta"))


def check_class(
    folder: Path,
    attention: str | None,
    family: type[CausalLM] = CausalLM,
    *,
    critic: bool = False,
    shared: bool = False,
) -> None:
    """Check that the class of a folder's model can be sampled and trained, without its weights.

    Args:
        folder: folder of the model.
        attention: ``model.attention``.
        family: the model family.
        critic: it is the backbone of a critic.
        shared: ``optimize.shared_prompts``.
    """
    label = "critic.path" if critic else "model.path"
    config = language_config(str(folder))
    if config is None:
        return  # loading reports the error
    try:
        model = meta_language_model(config, attention, None if critic else family.models)
    except ConfigError:
        raise
    except Exception as error:  # a class may fail in any way on inconsistent sizes
        raise ConfigError(
            f"{label} '{folder}' has a config.json of which no model can be made: {type(error).__name__}: {error}. "
            "Save the model with save_pretrained(), or choose another one."
        ) from error
    if critic:
        check_causal(folder, model, label=label, draws=False)
    else:
        family.check_model(folder, model)
    if shared:
        check_shares_prompts(model, label=label)
