"""How far the updates of an epoch moved the policy: its KLs, estimated on some of the epoch's rows.

``kl_epoch`` is the KL to the policy that sampled the rows, in the unit of the log-ratio that a clip range limits.
``kl_base`` is the KL to the base model, per token or per latent value, of algorithms that can compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowmill.configs.errors import FlowmillError
from flowmill.tasks.algorithms.base import Algorithm, Models
from flowmill.tasks.modalities.rows import Units, first_units
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import Reading, mean_losses

#: Most rows of an estimate. They cost two forwards each.
_ROWS = 64
#: An estimate has a row for so many of the epoch, so that it costs about a hundredth of it, but not fewer than 32.
_ONE_OF = 32
_FEWEST = 32
#: Limit of ``kl_epoch`` for an algorithm that has none.
_LIMIT = 1.0


def policy_moves(
    algorithm: Algorithm,
    models: Models,
    plan: Sequence[Units],
    *,
    reading: Reading,
    micro_batch_size: int,
    ranks: Ranks,
) -> dict[str, float]:
    """Return the KLs of the policy after the updates of a plan; all ranks must call this together."""
    models.measures = True
    means = mean_losses(
        algorithm,
        models,
        measured_units(plan),
        reading=reading,
        micro_batch_size=micro_batch_size,
        ranks=ranks,
    )
    models.measures = False
    moves = {"kl_epoch": means.get("kl_epoch", means["approx_kl"])}
    moves |= {name: means[name] for name in ("kl_base",) if name in means}
    _check_finite(moves)
    return moves


def measured_units(plan: Sequence[Units]) -> Units:
    """Return the units of an epoch that the KLs are measured on."""
    return first_units(plan, estimate_rows(sum(len(units.rows) for units in plan)))


def estimate_rows(rows: int) -> int:
    """Return the number of rows of an estimate for an epoch of so many rows."""
    return min(_ROWS, max(_FEWEST, rows // _ONE_OF))


def move_limits(algorithm: Algorithm) -> dict[str, float]:
    """Return the values of these KLs from which the alert 'kl' fires."""
    limits = {"kl_epoch_limit": getattr(algorithm, "kl_limit", _LIMIT)}
    base = getattr(algorithm, "kl_base_limit", None)
    return limits if base is None else {**limits, "kl_base_limit": base}


def _check_finite(kls: Mapping[str, float]) -> None:
    for name, value in kls.items():
        if not math.isfinite(value):
            raise FlowmillError(
                f"optimize: after the last update of this epoch {name} is {value}, so the update destroyed the policy. "
                "Lower optimize.learning_rate; finished epochs are kept."
            )
