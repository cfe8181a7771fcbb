"""Holds what drew texts to what training computes of them, by log-probs of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import EngineError
from models.engines.base import Engine
from models.engines.local import Local, tolerance_of
from models.maths.generation import Completion
from models.policies.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor


def check_gap(
    engine: Engine, policy: CausalLM, prompts: Sequence[int], found: Sequence[Completion], own: Sequence[Tensor]
) -> None:
    """Check that what completions were drawn with is what training's forward says of them, on the mean over tokens.

    Weights of a server may change while it draws; a class of models may compute something else with a cache.

    Args:
        engine: what drew.
        policy: what is trained.
        prompts: tokens of each prompt.
        found: completions.
        own: log-probs of each, as training computes them.

    Raises:
        EngineError: they are further apart than the engine may be.
    """
    tolerance = tolerance_of(engine, policy.settings.dtype, policy.settings.device)
    if tolerance is None:
        return
    rows = [
        np.abs(np.asarray(drawn.log_probs, np.float64) - whole.double().numpy())
        for drawn, whole in zip(found, own, strict=True)
    ]
    gaps = np.concatenate(rows)
    if gaps.mean() <= tolerance:
        return
    said = f"{len(gaps)} tokens it drew its log-probs are {gaps.mean():.3g} nats per token"
    raise EngineError(
        _of_policy(policy, prompts, rows, said, tolerance)
        if isinstance(engine, Local)
        else f"rollout.tokens.engine: of {said} from the policy's (at most {gaps.max():.3g}), more than its option "
        f"'tolerance', {tolerance:g}: it drew with other weights, or with another temperature than it was asked for. "
        "Load the policy into the server; of vLLM, start it with --logprobs-mode processed_logprobs. Nothing of this "
        "batch was stored: give the same command again."
    )


def _of_policy(
    policy: CausalLM, prompts: Sequence[int], rows: Sequence[np.ndarray], said: str, tolerance: float
) -> str:
    """Return what is wrong with a model whose KV cache gives something else than a forward over whole rows."""
    means = [float(row.mean()) for row in rows]
    worst = int(np.argmax(np.nan_to_num(means, nan=np.inf)))
    row = rows[worst]
    first = 1 + int(np.argmax(~(row <= tolerance)))
    config, dtype = policy.model.config, str(policy.settings.dtype).removeprefix("torch.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    how = [f"attention '{policy.facts['attention']}'", *([] if rope is None else [f"rope_type '{rope}'"])]
    return (
        f"model.path: of {said} from what training computes of them, more than the {tolerance:g} that rounding in "
        f"{dtype} explains. The {type(policy.model).__name__} ({', '.join(how)}) gives something else with a KV cache "
        f"and padding before a text than over whole rows. In the furthest row, {len(row)} tokens after a prompt of "
        f"{prompts[worst]}, it is {means[worst]:.3g} on the mean and begins at token {first}. Training would not be of "
        "what was drawn, so nothing of this batch was stored. Set model.attention to 'eager', or choose another model."
    )
