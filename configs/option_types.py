"""Types of options of components, checked by ``flowmill.configs.registry``; pydantic has more, such as
``PositiveFloat``.

A string in an annotation is the remedy: ``Annotated[PositiveFloat, "Use sampler 'ode' for no noise."]``.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

#: From 0 to 1.
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
#: Above 0, and at most 1.
PositiveShare: TypeAlias = Annotated[float, Field(gt=0, le=1)]
#: Between 0 and 1.
OpenShare: TypeAlias = Annotated[float, Field(gt=0, lt=1)]

#: Pixels of an image: so many that its sides are not rounded to 0 at 8 to 1, the narrowest shape that models take.
Area: TypeAlias = Annotated[int, Field(ge=64 * 64)]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None


def _grouped(pattern: re.Pattern[str]) -> re.Pattern[str]:
    if pattern.groups < 1:
        raise ValueError("it has no group; put the result in parentheses")
    return pattern


#: A regular expression.
Regex: TypeAlias = Annotated[str, AfterValidator(_compiled)]
#: A regular expression whose first group is the result.
GroupRegex: TypeAlias = Annotated[Regex, AfterValidator(_grouped)]
