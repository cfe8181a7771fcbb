"""Actions on alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from flowmill.configs.base import Section

_BACK = (
    "Set the rule to 'warn' or 'stop'. optimize.stop_kl undoes updates that move the policy too far, and 'flowmill run "
    "--rewind' with fewer epochs ends a run at an earlier policy"
)


class WatchSection(Section):
    """Actions on alerts, which are computed from committed artifacts."""

    removed: ClassVar[Mapping[str, str]] = {"rate": f"Its action 'back' no longer exists either. {_BACK}."}
    former: ClassVar[Mapping[str, Any]] = {"rate": 0.1}
    on: dict[str, Literal["warn", "stop"]] = Field(default_factory=dict)
    """Action by rule: warn (default), or stop, which ends the run before its next stage."""

    @field_validator("on", mode="before")
    @classmethod
    def _never_back(cls, value: Any) -> Any:
        for rule, action in value.items() if isinstance(value, Mapping) else ():
            if action == "back":
                raise ValueError(f"the action 'back', which rule '{rule}' has, no longer exists. {_BACK}")
        return value
