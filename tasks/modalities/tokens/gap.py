"""Compares the log-probs of the engine that drew texts with those that training computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowmill.configs.errors import EngineError
from flowmill.models.engines.base import Engine
from flowmill.models.engines.local import LocalEngine, tolerance_of
from flowmill.models.maths.generation import Completion
from flowmill.models.policies.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor


def check_gap(
    engine: Engine, policy: CausalLM, prompts: Sequence[int], completions: Sequence[Completion], own: Sequence[Tensor]
) -> None:
    """Check that the engine's log-probs of completions agree with those of training, on the mean over tokens.

    The weights of a server may change while it draws, and a model class may compute something else with a cache.

    Args:
        engine: the engine that drew the completions.
        policy: the trained policy.
        prompts: tokens of each prompt.
        own: log-probs of each, as training computes them.
    """
    tolerance = tolerance_of(engine, policy.settings.dtype, policy.settings.device)
    if tolerance is None:
        return
    tolerance *= policy.rounding
    rows = [
        np.abs(np.asarray(drawn.log_probs, np.float64) - whole.double().numpy())
        for drawn, whole in zip(completions, own, strict=True)
    ]
    gaps = np.concatenate(rows)
    if gaps.mean() <= tolerance:
        return
    difference = f"over {len(gaps)} drawn tokens its log-probs are {gaps.mean():.3g} nats per token"
    raise EngineError(
        _of_policy(policy, prompts, rows, difference, tolerance)
        if isinstance(engine, LocalEngine)
        else f"rollout.tokens.engine: {difference} from the policy's (at most {gaps.max():.3g}), more than its option "
        f"'tolerance', {tolerance:g}: it drew with other weights, or with another temperature than requested. "
        "Load the policy into the server; start vLLM with --logprobs-mode processed_logprobs. Nothing of this "
        "batch was stored: give the same command again."
    )


def _of_policy(
    policy: CausalLM, prompts: Sequence[int], rows: Sequence[np.ndarray], difference: str, tolerance: float
) -> str:
    """Return the error message for a model whose KV cache differs from a forward over whole rows."""
    means = [float(row.mean()) for row in rows]
    worst = int(np.argmax(np.nan_to_num(means, nan=np.inf)))
    row = rows[worst]
    first = 1 + int(np.argmax(~(row <= tolerance)))
    config, dtype = policy.model.config, str(policy.settings.dtype).removeprefix("torch.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    how = [f"attention '{policy.facts['attention']}'", *([] if rope is None else [f"rope_type '{rope}'"])]
    return (
        f"model.path: {difference} from those that training computes, more than the {tolerance:g} that rounding in "
        f"{dtype} explains. The {type(policy.model).__name__} ({', '.join(how)}) computes other values with a KV cache "
        f"and left padding than over whole rows. In the worst row, {len(row)} tokens after a prompt of "
        f"{prompts[worst]}, the mean distance is {means[worst]:.3g} and starts at token {first}. Training would not "
        "match the drawn texts, so nothing of this batch was stored. Set model.attention to 'eager', or choose another "
        "model."
    )
