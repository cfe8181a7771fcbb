"""APO-zero (arXiv 2408.06266, eq. 7) on single samples that are desired or not: KTO with the reference point 0.

The loss of a sample does not depend on the others of its update, and no further forwards are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowmill.tasks.algorithms.kto import KTO
from flowmill.tasks.algorithms.token_kto import TokenKTO


@dataclass(frozen=True, slots=True, kw_only=True)
class APOZero(KTO):
    """Of denoisers."""

    mismatched: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAPOZero(TokenKTO):
    """Of language models; TRL's ``apo_zero_unpaired``."""

    mismatched: ClassVar[bool] = False
