"""The section of data that people already have: samples to train on instead of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from flowmill.configs.base import Later, Section

#: Parts of a row, and the names of their columns where none are set; each is also a short setting: ``data.sample``.
USUAL_COLUMNS: Mapping[str, str | None] = {
    "prompt": "prompt",
    "prompt_image": None,
    "sample": "image",
    "messages": None,
    "chosen": None,
    "rejected": None,
    "rating": None,
}
#: Samples of which another column says which is preferred, and what says how they are rated.
_PLACES, _HOW = {"first": "chosen", "second": "rejected"}, ("preferred", "rank")


def spelled_out(section: Any) -> Any:
    """Return a section of data with its short settings under ``columns``, but for those that contradict it."""
    columns = section.get("columns") or {} if isinstance(section, Mapping) else None
    if not isinstance(columns, Mapping):
        return section
    short = {role: section[role] for role in USUAL_COLUMNS if role in section}
    moved = {role: name for role, name in short.items() if columns.get(role, name) == name or name is None}
    # Null takes back a name, as one of a preset.
    rest = {name: value for name, value in section.items() if name not in moved}
    return {**rest, "columns": {**columns, **moved}} if moved else section


class PriorSection(Section):
    """Samples of the class of a subject, on which the policy stays as it is (DreamBooth, arXiv 2208.12242)."""

    train: str
    """Their rows, named as those of `data.train`; an epoch has as many of them as of those, at most all."""
    weight: float = Field(1.0, gt=0)
    """Factor of their loss."""


class DataSection(Section):
    """Given samples: pairs of prompt and image, clip or text, preferred and refused samples, or rated ones.

    A row names its prompt and either one sample, or a chosen and a rejected one. Other columns become metadata of the
    prompt, such as a license.
    """

    setting: ClassVar[str] = "data.train"
    """The setting that names the rows, for messages."""
    trained: ClassVar[bool] = True
    """Whether a policy is trained on the rows; on judgments a reward is fitted."""
    repeated: ClassVar[bool] = True
    """Whether rows count several times if ``repeats`` says so."""

    train: str
    """The rows: files (.jsonl, .json, .parquet, .csv and .tsv with a header, WebDataset .tar, also with .gz), several
    ("train-*.parquet", "pairs-{000..015}.tar", "a.tar::s3://bucket/b.tar"), a folder of such files, of images with a
    text file of the same name next to each or `metadata.csv`, or of `save_to_disk` of datasets, or a Hugging Face
    dataset id; all but the last also on S3. Paths are relative to the config file."""
    heldout: Annotated[str | None, Later()] = None
    """Rows of the same columns, named as `train` is, that are not trained on: their loss is a figure of each
    evaluation. A row of `train` with a prompt or sample of theirs cannot be used."""
    columns: Annotated[dict[str, str], Later()] = Field({})
    """Column of each part of a row, where the names of columns do not say it: prompt (in tars the extension of its
    member, such as txt; empty for texts without a prompt); prompt_image, as `prompts.image`; sample, the path of an
    image or clip below the folder of the rows, or a text, or a list of them; instead, chosen and rejected, or first,
    second and preferred (1, A or first; 0, B or second; 0.5 or tie); instead of prompt and sample, messages: lists of
    messages with role (system, user, assistant) and content, of which every answer is trained on but those of weight
    0; rating, or rank (1 is best), of a list a list. A column may lie in another (input.messages), and the prompt be a
    text of several ("{instruction}\\n{input}"). Those but first, second, preferred and rank are also short settings:
    `data.sample`."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest rating; a rating outside is refused. False and true are 0 and 1."""
    neutral: float | None = None
    """The rating from which samples are desired; the middle of the scale when absent."""
    keep: tuple[str, ...] = ()
    """Columns of samples or ratings that also stay metadata, such as a right answer that rewards compare with."""
    split: str = "train"
    """Split to read of a dataset with several."""
    buckets: Annotated[tuple[tuple[int, int], ...], Later()] = ()
    """Sizes of training images, each [height, width]: a row gets the one with the nearest aspect ratio. All images get
    model.height and model.width when empty."""
    crop: Annotated[Literal["center", "random"], Later()] = "center"
    """'random': a sample of another shape is encoded in `windows` places along its longer side; an epoch draws one."""
    windows: Annotated[int, Later()] = Field(4, ge=2, le=64)
    """Places of random crops, drawn for each row."""
    flip: Annotated[bool, Later()] = False
    """Samples are also encoded mirrored, left to right; an epoch draws one of the two. A pair is cropped and mirrored
    alike."""
    captions: Annotated[Literal["one", "several"], Later()] = "one"
    """'several': a prompt is a list of captions, or a text with one on each line; an epoch draws one for each row."""
    empty_captions: Annotated[float, Later()] = Field(0.0, ge=0, lt=1)
    """Share of rows that an epoch trains without a caption, as guidance needs it; drawn in each epoch."""
    repeats: Annotated[int | Literal["folders"], Later()] = Field(1)
    """Times that a pass has each row; 'folders': by the number that begins the name of its folder (`10_my dog`), whose
    other part is the caption of images without a text. Each time is encoded."""
    prior: Annotated[PriorSection | None, Later()] = None
    """Samples on which the policy stays as it is, next to those of a subject."""
    groups_per_epoch: int | None = Field(None, ge=1)
    """Prompts, or pairs, of an epoch, in a seeded permutation for each pass; all when absent."""
    rows_per_shard: int = Field(256, ge=1)
    """Rows of one committed shard: the work that a crash can lose. Does not change results."""
    bad_rows: Literal["stop", "leave_out"] = "stop"
    """A row that cannot be used stops the run, or is left out and recorded with its reason."""

    @model_validator(mode="before")
    @classmethod
    def _by_role(cls, value: Any) -> Any:
        value = spelled_out(value)
        if not isinstance(value, Mapping) or not isinstance(value.get("columns"), Mapping):
            return value
        if double := next((role for role in USUAL_COLUMNS if role in value), None):
            raise ValueError(f"data.{double} and data.columns name different columns for '{double}': remove one")
        named = {_PLACES.get(role, role): column for role, column in value["columns"].items()}
        if unknown := next((role for role in named if role not in (*USUAL_COLUMNS, *_HOW)), None):
            roles = ", ".join((*USUAL_COLUMNS, *_PLACES, *_HOW))
            raise ValueError(f"data.columns names a column for '{unknown}', but the parts of a row are {roles}")
        usual = {**USUAL_COLUMNS, "rating": named.get("rank")}
        special = {role: name for role, name in named.items() if name is not None and name != usual.get(role)}
        return {**value, "columns": special}

    @model_validator(mode="after")
    def _whole(self) -> DataSection:
        if (self.chosen is None) != (self.rejected is None):
            raise ValueError("data.columns: chosen and rejected belong together: name both columns, or neither")
        if self.paired and self.messages is not None:
            raise ValueError("data.columns: messages names chats and chosen pairs: remove one of the two")
        if self.prompt_image is not None and self.messages is not None:
            raise ValueError("data.columns: messages names chats, which are texts, and prompt_image images: remove one")
        if self.paired and self.rating is not None:
            raise ValueError("data.columns: rating belongs to single samples, and chosen names pairs: remove one")
        if isinstance(self.repeats, int) and self.repeats < 1:
            raise ValueError(f"data.repeats is {self.repeats}; a row counts once or more. Remove it, or raise it")
        if self.windows != type(self).model_fields["windows"].default and self.crop != "random":
            raise ValueError("data.windows is the number of random crops: remove it, or set data.crop to 'random'")
        low, high = self.scale
        if not low < high:
            raise ValueError(f"data.scale is {low} to {high}; its first value must be the lower one")
        if self.neutral is not None and not low <= self.neutral <= high:
            raise ValueError(f"data.neutral is {self.neutral}, outside data.scale {low} to {high}")
        return self

    @property
    def prompt(self) -> str:
        """Column of the prompt; empty for texts without one."""
        return self.columns.get("prompt", "prompt")

    @property
    def prompt_image(self) -> str | None:
        """Column of the input images of the prompt."""
        return self.columns.get("prompt_image")

    @property
    def sample(self) -> str:
        """Column of the sample."""
        return self.columns.get("sample", "image")

    @property
    def chosen(self) -> str | None:
        """Column of the better sample of a pair."""
        return self.columns.get("chosen")

    @property
    def rejected(self) -> str | None:
        """Column of the worse sample of a pair."""
        return self.columns.get("rejected")

    @property
    def messages(self) -> str | None:
        """Column of chats."""
        return self.columns.get("messages")

    @property
    def rating(self) -> str | None:
        """Column of the rating, or of the rank, of a sample."""
        return self.columns.get("rating", self.columns.get("rank"))

    @property
    def paired(self) -> bool:
        """Whether rows hold a chosen and a rejected sample."""
        return self.chosen is not None

    @property
    def variants(self) -> dict[str, Any]:
        """How a row is encoded in several ways, if an epoch draws one of these or of captions, or has rows of
        ``prior``; empty if each row is used as it is."""
        drawn = self.flip or self.crop == "random" or self.captions == "several" or self.empty_captions > 0
        windows = self.windows if self.crop == "random" else 0
        return {"flip": self.flip, "windows": windows} if drawn or self.prior is not None else {}

    def rows_of_prior(self) -> DataSection | None:
        """Return the section of the rows of ``prior``; None without any."""
        if self.prior is None:
            return None
        return PriorRowsSection.model_validate({**self.model_dump(), "train": self.prior.train, "prior": None})

    def heldout_rows(self) -> DataSection:
        """Return the section of the rows of ``heldout``, which are used once and as they are."""
        plain = self.model_dump(exclude={"prior", "flip", "crop", "windows", "empty_captions"})
        return HeldOutSection.model_validate({**plain, "train": self.heldout})

    @property
    def middle(self) -> float:
        """The rating from which samples are desired."""
        return sum(self.scale) / 2 if self.neutral is None else self.neutral


class HeldOutSection(DataSection):
    """The rows of ``data.heldout``, named as those to train on are."""

    setting: ClassVar[str] = "data.heldout"
    repeated: ClassVar[bool] = False


class PriorRowsSection(DataSection):
    """The rows of ``data.prior``, named as those to train on are."""

    setting: ClassVar[str] = "data.prior.train"
