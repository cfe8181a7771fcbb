"""Which steps a rollout stores where a config does not say: as its algorithm needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Algorithms that noise final latents anew, and so need nothing else of a rollout; a test compares with what they say.
FORWARD = frozenset({"nft", "awm", "dpo", "dgpo", "crd"})


def with_plan(data: Any) -> Any:
    """Return a config's data with the plan that its algorithm needs, where it leaves the plan out."""
    rollout, optimize = (_section(data, name) for name in ("rollout", "optimize"))
    if rollout is None or optimize is None or rollout.get("plan") is not None:
        return data
    algorithm = optimize.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    if not isinstance(name, str) or name not in FORWARD:
        return data
    return {**data, "rollout": {**rollout, "plan": {"name": "final"}}}


def without_default_plan(filled: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Leave a plan out again that neither a file nor overrides name: one of these may name another algorithm."""
    named = _section(given, "rollout") or {}
    if "plan" not in named and not any(each.startswith("rollout.plan") for each in overrides):
        (_section(filled, "rollout") or {}).pop("plan", None)


def _section(data: Any, name: str) -> dict[str, Any] | None:
    """Return a section as it is written down, {} where it is left out, None where it is no such thing."""
    found = data.get(name) if isinstance(data, Mapping) else None
    if found is None:
        return {} if isinstance(data, Mapping) else None
    return found if isinstance(found, dict) else None
