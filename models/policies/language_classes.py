"""Which classes of causal language models can be sampled and trained here, and which attention they compute with.

Rows are padded on the left while they are drawn, and on the right while they are trained on: what a class computes of a
row may depend on neither. ``tests/models/test_language_classes.py`` compares both for every class of transformers.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from configs.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: Classes without an argument for positions whose attention is of distances alone, so that padding shifts nothing.
_RELATIVE = frozenset({"bloom", "mpt", "roformer"})
#: Layers of a cache that hold one row apart from another and leave out padding; a class with others is refused.
_CACHES = frozenset(
    {
        *("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer", "LinearAttentionLayer"),
        *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
    }
)
#: Attributes of a class that say that it has an implementation; all classes have 'eager'.
_SUPPORTED = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flash_attention_4": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
#: What transformers asks whether it can use an implementation; where it cannot, it would download a kernel.
_AVAILABLE = {f"flash_attention_{number}": f"is_flash_attn_{number}_available" for number in (2, 3, 4)}


def attention_of(auto: Any, config: Any, asked: str | None, *, label: str = "model.path") -> str:
    """Return the attention that a model computes with: as asked for, else SDPA where its class has it, else eager.

    Args:
        auto: ``AutoModelForCausalLM`` or ``AutoModel``.
        config: of transformers.
        asked: ``model.attention``.
        label: the setting that names the model.

    Raises:
        ConfigError: transformers has no such model of this config, or the class does not have what is asked for.
    """
    kind = _class_of(auto, config, label)
    named = getattr(kind, "_compatible_flash_implementations", None)
    known = ["eager", *(name for name, flag in _SUPPORTED.items() if getattr(kind, flag, False))]
    if named:
        known = [name for name in known if not name.startswith("flash") or name in named]
    if asked is None:
        return "sdpa" if "sdpa" in known else "eager"
    if asked not in known:
        raise ConfigError(
            f"model.attention is '{asked}', but {label} holds a {kind.__name__}, which has {', '.join(sorted(known))}. "
            "Choose one of these, or remove model.attention."
        )
    return asked


def check_installed(attention: str) -> None:
    """Check that what an attention needs is on this machine.

    Raises:
        ConfigError: it is not.
    """
    from transformers.utils import import_utils

    asked = _AVAILABLE.get(attention)
    if asked is not None and not getattr(import_utils, asked)():
        raise ConfigError(
            f"model.attention is '{attention}', but its package or a GPU that it works on is missing, and no kernel is "
            "downloaded in its place. Install the package, or remove model.attention."
        )


def _class_of(auto: Any, config: Any, label: str) -> Any:
    kinds = auto._model_mapping
    if type(config) not in kinds:
        raise ConfigError(
            f"{label} holds a model of the type '{config.model_type}', of which transformers has no "
            f"{auto.__name__[4:]}. Choose a causal language model."
        )
    found = kinds[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def check_causal(folder: Path, model: Any, *, label: str = "model.path", draws: bool = True) -> None:
    """Check that a model, with or without weights, computes the same of a text however it is drawn and padded.

    Args:
        folder: that it was loaded from.
        model: of transformers.
        label: the setting that names it.
        draws: texts are drawn with it; False of a critic, which reads whole rows alone.

    Raises:
        ConfigError: it reads later tokens, has no usable cache, or positions that follow from padding.
    """
    reason = _why_not(model, draws=draws)
    if reason is not None:
        raise ConfigError(f"{label} '{folder}' holds a {type(model).__name__} {reason} Choose another model.")


def _why_not(model: Any, *, draws: bool) -> str | None:
    """Return why a model cannot be used, as the end of a sentence and perhaps another; None where it can."""
    config = model.config
    decoder = getattr(config, "is_decoder", True)
    if not decoder and not any(getattr(module, "is_causal", False) for module in model.modules()):
        return (
            f"that reads texts both ways (is_decoder is {decoder}), so that what it says of a token would be said with "
            "that token seen."
        )
    if draws and not _keeps_cache(model):
        return "that has no cache of keys and values by token, so that no text can be drawn token by token."
    if not takes_positions(model) and config.model_type not in _RELATIVE:
        return "that takes no positions (position_ids): padding before a text would shift it."
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return "that counts positions from the id of its padding token on, so that padding is part of a text."
    return None


def _keeps_cache(model: Any) -> bool:
    """Return whether a model's cache is one of transformers with known layers, which rows can be dealt out of."""
    from transformers import DynamicCache

    usual = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    if "past_key_values" not in inspect.signature(type(model).forward).parameters or not usual():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return {type(layer).__name__ for layer in layers} <= _CACHES


def takes_positions(model: Any) -> bool:
    """Return whether a model of transformers is told the positions of tokens."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def whole_positions(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return what tells a model that rows of (B, W) ids begin at position 0, (1, W) int64; {} where it takes none."""
    if not takes_positions(model):
        return {}
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}
