"""Checks which classes of causal language models can be sampled and trained, and selects their attention.

Rows are padded on the left for sampling and on the right for training: a class's outputs must not depend on padding.
``tests/models/policies/test_language_classes.py`` compares both for every class of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.models.maths.row_tails import RowTails

if TYPE_CHECKING:
    from flowmill.models.maths.row_tails import UsedOutputs
    from flowmill.models.maths.shared_prompts import SharedPrompts

#: Classes without a position argument whose attention depends on distances only, so that padding has no effect.
_RELATIVE = frozenset({"bloom", "mpt", "roformer"})
#: Cache layers that keep rows separate and ignore padding; a class with other layers is refused.
_CACHES = frozenset(
    (
        "DynamicLayer DynamicSlidingWindowLayer DynamicIndexedLayer DummyLayer LinearAttentionLayer "
        "LinearAttentionAndFullAttentionLayer LinearAttentionAndSlidingWindowAttentionLayer"
    ).split()
)
_POSITIONS = "position_ids"
#: Class attributes that declare support of an implementation; all classes have 'eager'.
_SUPPORTED = {
    "sdpa": "_supports_sdpa",
    **{f"flash_attention_{number}": "_supports_flash_attn" for number in (2, 3, 4)},
    "flex_attention": "_supports_flex_attn",
}
#: Functions by which transformers checks an implementation's availability; if it fails, it would download a kernel.
_AVAILABLE = {f"flash_attention_{number}": f"is_flash_attn_{number}_available" for number in (2, 3, 4)}


def attention_of(auto: Any, config: Any, requested: str | None, *, label: str = "model.path") -> str:
    """Return a model's attention implementation: the requested one, else SDPA if its class has it, else eager. Raises
    ConfigError if transformers has no such model for this config, or its class lacks the requested implementation.
    ``auto``: ``AutoModelForCausalLM`` or ``AutoModel``; ``requested``: ``model.attention``."""
    kind = _class_of(auto, config, label)
    named = getattr(kind, "_compatible_flash_implementations", None)
    supported = ["eager", *(name for name, flag in _SUPPORTED.items() if getattr(kind, flag, False))]
    if named:
        supported = [name for name in supported if not name.startswith("flash") or name in named]
    if requested is None:
        return "sdpa" if "sdpa" in supported else "eager"
    if requested not in supported:
        raise ConfigError(
            f"model.attention is '{requested}', but {label} holds a {kind.__name__}, which has "
            f"{', '.join(sorted(supported))}. Choose one of these, or remove model.attention."
        )
    return requested


def check_installed(attention: str) -> None:
    """Check that this machine has the package and GPU that an attention implementation needs; raise ConfigError."""
    from transformers.utils import import_utils

    check = _AVAILABLE.get(attention)
    if check is not None and not getattr(import_utils, check)():
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
    kind = kinds[type(config)]
    return kind[0] if isinstance(kind, tuple | list) else kind


def check_causal(folder: Path, model: Any, *, label: str = "model.path", draws: bool = True) -> None:
    """Check that a model's outputs for a text are the same in sampling and training, under any padding; raise
    ConfigError if it reads later tokens, has no usable cache, or positions that follow from padding. ``draws``: True if
    texts are sampled with it; False for a critic, which only reads whole rows."""
    reason = _why_not(model, draws=draws)
    if reason is not None:
        raise ConfigError(f"{label} '{folder}' holds a {type(model).__name__} {reason} Choose another model.")


def _why_not(model: Any, *, draws: bool) -> str | None:
    """Return the reason a model cannot be used, as the end of a sentence, or None."""
    config = model.config
    _check_library()
    decoder = getattr(config, "is_decoder", True)
    if not decoder and not any(getattr(module, "is_causal", False) for module in model.modules()):
        return (
            f"that reads texts both ways (is_decoder is {decoder}), so that its prediction of a token would depend on "
            "that token."
        )
    if not takes_positions(model) and config.model_type not in _RELATIVE:
        return "that takes no positions (position_ids): padding before a text would shift it."
    if draws and not _keeps_cache(model):
        return "that has no cache of keys and values per token, so that it cannot draw texts token by token."
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return (
            "that counts positions from the id of its padding token, so that padding changes the positions of a text."
        )
    return None


def _keeps_cache(model: Any) -> bool:
    """Return whether a model uses transformers' cache with supported layers only, so that its rows can be separated."""
    from transformers import DynamicCache

    usual, name = getattr(model, "_supports_default_dynamic_cache", lambda: True), cache_name()
    # Classes of before the caches take other objects under the same name, but return none.
    if name not in _returned(type(model)) or not _takes(type(model), name) or not usual():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return {type(layer).__name__ for layer in layers} <= _CACHES


@cache
def cache_name() -> str:
    """Return the name of the cache in what models take and return, which differs between releases of transformers."""
    from transformers import Cache, LlamaForCausalLM

    hints = _returned(LlamaForCausalLM).items()
    return next((name for name, kind in hints if Cache in (kind, *get_args(kind))), "")


def _returned(kind: type) -> dict[str, Any]:
    """Return the fields of the outputs of a model class, and their types."""
    outputs = get_type_hints(kind.forward).get("return")  # type: ignore[attr-defined]
    classes = [each for each in (outputs, *get_args(outputs)) if is_dataclass(each)]
    return {name: hint for each in classes for name, hint in get_type_hints(each).items()}


def _check_library() -> None:
    """Check that models are called as this module knows, by a Llama; raise ConfigError, as otherwise every model would
    be refused as unfit."""
    from transformers import LlamaForCausalLM, __version__

    if not all(_takes(LlamaForCausalLM, name) for name in (_POSITIONS, cache_name())):
        raise ConfigError(
            f"transformers {__version__} is installed, whose language models take other arguments than those that "
            "flowmill knows. Install a release that flowmill's requirements allow."
        )


def takes_positions(model: Any) -> bool:
    """Return whether a transformers model takes the positions of tokens as an argument."""
    return _takes(type(model), _POSITIONS)


def _takes(kind: type, argument: str) -> bool:
    return argument in inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]


def at(model: Any, ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a transformers model for ids (B, W) at positions, which it may not take."""
    return {"input_ids": ids, **({"position_ids": positions} if takes_positions(model) else {})}


def whole(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a transformers model for whole rows (B, W), at positions from 0 on."""
    return at(model, ids, torch.arange(ids.shape[1], device=ids.device)[None])


@contextmanager
def head_reads(model: Any, used: UsedOutputs) -> Iterator[None]:
    """Let the head of a transformers model compute logits of tails alone inside the context; a model without a head
    computes all."""
    if not isinstance(used, RowTails) or (head := model.get_output_embeddings()) is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: (used.tails(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def shared_inputs(shared: SharedPrompts, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return packed rows as keyword arguments of a transformers model; ``dtype`` is that of its attention scores."""
    return {
        "input_ids": shared.ids,
        "position_ids": shared.positions,
        "attention_mask": shared.mask(dtype),
    }


def check_shares_prompts(model: Any, *, label: str = "model.path") -> None:
    """Check that texts of a group can share the tokens of their prompt; raise ConfigError if the class or its attention
    takes no mask of single tokens, or layers depend on the order of tokens. ``model``: it, without weights."""
    config, attention = model.config.get_text_config(decoder=True), str(model.config._attn_implementation)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    remedy = "Remove optimize.shared_prompts"
    if layers != {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        reason = "with layers that depend on the order of tokens (a sliding window, or a recurrence)"
    elif not takes_positions(model):
        reason = "that takes no positions of tokens (position_ids)"
    elif attention not in ("sdpa", "eager"):
        reason, remedy = (
            f"whose attention '{attention}' takes no mask of single tokens",
            f"{remedy}, or model.attention",
        )
    else:
        return
    raise ConfigError(
        f"optimize.shared_prompts is true, but {label} holds a {type(model).__name__} {reason}. {remedy}."
    )
