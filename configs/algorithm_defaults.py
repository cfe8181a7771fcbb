"""An algorithm's requirements, and defaults that depend on it: stored steps, and the estimator of advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Algorithms that add fresh noise to final latents and need no other part of a rollout; a test checks the list.
FORWARD = frozenset(
    {"nft", "awm", "v_grpo", "dpo", "dgpo", "crd", "ram", "reward_gradient", "direct_align", "sft", "kto", "apo_zero"}
)
#: Algorithms that continue from stored states; a test checks the list.
STATES = frozenset({"refl"})
#: Algorithms whose advantages are per token, and the estimator each is defined with; a test checks the list.
PER_TOKEN = {"ppo": "gae", "reinforce_plus_plus": "reinforce_plus_plus"}
#: Names of algorithms in fingerprints: 'kto' was APO-zero, whose results keep their fingerprints under its own name.
IDENTITIES = {"apo_zero": "kto", "kto": "kto 2"}
#: Section and setting of each such default, and its value if the algorithm does not decide.
_FOLLOWING = (("rollout", "plan", "all"), ("advantage", "estimator", "group"))


class AlgorithmNeeds(NamedTuple):
    """The requirements of an algorithm that determine a run's stages and their inputs."""

    old_means: bool
    """Rollouts store the means of the behavior policy's steps."""
    gradients: bool
    """The run has stages for gradients of the rewards."""
    rewards: int
    """Number of reward calls per row during training."""
    ends: bool = True
    """Training uses the end of a chain, or a prediction of it; assumed of a custom algorithm."""
    desired: bool = False
    """Only desired samples are trained on; runs of earlier versions trained the others as rows of loss 0."""
    guided: bool = False
    """Velocities of the loss use the guidance of rollouts; runs of earlier versions did not record it."""


def with_followers(data: Any) -> Any:
    """Return a config's data, filling in the plan and the estimator that its algorithm needs if it names none."""
    for (part, setting, default), component in zip(_FOLLOWING, _needed(data), strict=True):
        section = _section(data, part)
        if section is None:
            continue
        value = section.get(setting)
        if value is None and component is not None:
            data = {**data, part: {**section, setting: {"name": component}}}
        elif isinstance(value, Mapping) and "name" not in value:
            data = {**data, part: {**section, setting: {"name": component or default, **value}}}
    return data


def _needed(data: Any) -> tuple[str | None, str | None]:
    """Return the plan and the estimator that the algorithm of a config's data needs, None if any works."""
    optimize = _section(data, "optimize")
    algorithm = None if optimize is None else optimize.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    return (_plan_of(name), PER_TOKEN.get(name)) if isinstance(name, str) else (None, None)


def _plan_of(algorithm: str) -> str | None:
    """Return the plan that an algorithm needs, None if any plan works."""
    return "final" if algorithm in FORWARD else "late" if algorithm in STATES else None


def without_followers(filled: dict[str, Any], original: Mapping[str, Any]) -> None:
    """Remove the filled-in names that a file does not give: an override may name another algorithm."""
    for part, setting, _ in _FOLLOWING:
        section = _section(filled, part) or {}
        named = (_section(original, part) or {}).get(setting, {})
        if isinstance(named, Mapping) and "name" not in named and isinstance(section.get(setting), dict):
            section[setting].pop("name", None)


def without_own_followers(filled: dict[str, Any]) -> dict[str, Any]:
    """Remove the components that the algorithm of a whole config gives, in place: a change may name another one."""
    for (part, setting, default), component in zip(_FOLLOWING, _needed(filled), strict=True):
        if filled[part][setting] == {"name": component or default, "options": {}}:
            del filled[part][setting]
    return filled


def _section(data: Any, name: str) -> dict[str, Any] | None:
    """Return a section of raw data, {} if it is missing, None if it is not a mapping."""
    section = data.get(name) if isinstance(data, Mapping) else None
    if section is None:
        return {} if isinstance(data, Mapping) else None
    return section if isinstance(section, dict) else None
