"""The request of ``flowmill rate``. Imports nothing heavy: the command's help reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from flowmill.configs.command_options import CommandLine

TOKEN = "FLOWMILL_RATE_TOKEN"
"""Environment variable with the token of raters."""
RaterName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[\w .@+-]+$")]
"""Name of a rater."""
Task = Literal["compare", "stars", "rank"]
"""The answer to a group of samples: which of two is better, stars for each, or the rank of each."""
STARS = 5
"""Most stars of a sample."""


class RateRequest(BaseModel):
    """The samples that raters compare, and the server: the options of ``flowmill rate``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run: Annotated[str, CommandLine("RUN", "RUN")]
    """Run; its store keeps the answers."""
    against: Annotated[str | None, CommandLine(metavar="RUN")] = None
    """Compare its evaluation with that of this run."""
    epoch: Annotated[int | None, CommandLine(metavar="N")] = Field(default=None, ge=0)
    """Compare samples of the rollout of this epoch; with --against, evaluations of this epoch."""
    evaluation: bool = False
    """Compare samples of the evaluation of --epoch, not of its rollout."""
    task: Task = "compare"
    """compare: which of two samples is better; stars: 1 to 5 for each sample of a group; rank: the order of a group."""
    group: Annotated[int, CommandLine(metavar="N")] = Field(default=4, ge=2, le=6)
    """Samples of a prompt that --task stars and rank show together."""
    question: Annotated[str, CommandLine(metavar="TEXT")] = Field(default="", max_length=300)
    """Question to raters, in place of that of the config or the task; answers to other questions are apart."""
    guidelines: Annotated[Path | None, CommandLine(metavar="FILE")] = None
    """Text file that raters read first, and can read again, in place of the config's guidelines."""
    rater: Annotated[RaterName | None, CommandLine(metavar="NAME")] = None
    """Name of the rater, for the printed link; without a name in its link the page requests one."""
    pairs: Annotated[int | None, CommandLine(metavar="N")] = Field(default=None, ge=1)
    """Number of pairs or groups for each rater; all when absent."""
    overlap: Annotated[int | None, CommandLine(metavar="N")] = Field(default=None, ge=1)
    """Number of raters who answer each pair or group; all raters when absent."""
    scorer: Annotated[str | None, CommandLine(metavar="REWARD")] = None
    """Prefer pairs whose scores by this reward are closest; then win rates are of these pairs only."""
    seed: int = 0
    """Seed of the order of pairs and of their sides."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port; 0 takes a free one."""

    @field_validator("evaluation")
    @classmethod
    def _of_an_epoch(cls, evaluation: bool, info: ValidationInfo) -> bool:
        if evaluation and info.data.get("against") is not None:
            raise ValueError("--against compares evaluations in any case. Leave --evaluation out.")
        if evaluation and info.data.get("epoch") is None:
            raise ValueError("It is the evaluation of one epoch, and none is named. Name it with --epoch N.")
        return evaluation

    @field_validator("group")
    @classmethod
    def _of_a_task(cls, group: int, info: ValidationInfo) -> int:
        # A command gives the default, too.
        if info.data.get("task") == "compare" and group != cls.model_fields["group"].default:
            raise ValueError("--task compare shows two samples. Leave --group out, or choose --task stars or rank.")
        return group
