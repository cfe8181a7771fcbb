"""Reward models of transformers: where they are loaded from."""

from __future__ import annotations

from typing import Any

from configs.errors import ConfigError
from models.libraries import quiet_libraries


def load_pretrained(kind: str, path: str, revision: str | None, *, reward: str) -> Any:
    """Return a model or processor of transformers, of a folder or of a hub repository; weights from safetensors alone.

    Args:
        kind: class in transformers.
        path: folder, or id on the hub.
        revision: commit, tag or branch of a repository.
        reward: who asks, for messages.

    Raises:
        ConfigError: it is nowhere, cannot be reached, or has only weights that would have to be unpickled.
    """
    import transformers

    quiet_libraries()
    weights = {} if kind.endswith(("Processor", "Tokenizer", "Config")) else {"use_safetensors": True}
    try:
        return getattr(transformers, kind).from_pretrained(path, revision=revision, **weights)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward '{reward}': '{path}' cannot be loaded: {str(error).splitlines()[0]} Give the id of a repository "
            "that can be reached and has safetensors weights, or a local folder of one ('hf download ID')."
        ) from None
