"""The default engine of chains: the policy in this process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InProcess:
    """The default: needs no server, and has no options."""
