"""The request of ``flowmill publish``. Imports nothing heavy: the command's help is made of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.command_options import CommandLine

Part = Literal["rollouts", "given", "evaluations", "preferences"]
"""A part of a published dataset."""


class PublishRequest(BaseModel):
    """The files to upload and their repository: the options of ``flowmill publish``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Annotated[str, CommandLine("RUN", "RUN[@EPOCH]")]
    """Run, or RUN@EPOCH."""
    repo: Annotated[str, CommandLine("REPO", "OWNER/NAME")]
    """Repository on the Hugging Face Hub."""
    dataset: bool = False
    """Publish the samples of the run with their scores instead of its model; first the plan is shown."""
    epoch: Annotated[list[int], CommandLine(metavar="N")] = Field(default_factory=list)
    """Epoch of the export, the last when absent; with --dataset the epochs of samples, all when absent."""
    part: Annotated[list[Part], CommandLine(metavar="PART")] = Field(default_factory=list)
    """With --dataset: rollouts, given, evaluations or preferences; all that the run has when absent."""
    form: Annotated[Literal["parquet", "webdataset"], CommandLine("--format")] = "parquet"
    """With --dataset: Parquet files, or tars of WebDataset."""
    private: bool = False
    """Make a new repository private."""
    yes: bool = False
    """With --dataset: upload without asking."""
    token_env: Annotated[str | None, CommandLine(metavar="NAME")] = None
    """Environment variable that holds the token."""
