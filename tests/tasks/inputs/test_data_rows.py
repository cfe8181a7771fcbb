"""Rows of given data: all forms hold the same, and each row that cannot be used is named with its reason."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import s3fs

from flowmill.configs.data import DataSection, HeldOutSection
from flowmill.configs.errors import DataError
from flowmill.configs.paths import resolve_paths
from flowmill.configs.reward_fit import JudgmentRows
from flowmill.tasks.inputs.data_rows import read_data_rows
from flowmill.tasks.inputs.rows import remote
from tests.support.given import pairs, picture, rated, singles, write_form, write_jsonl
from tests.support.s3 import Faults, Server, make_bucket, unreliable, use

PAIRED = {"chosen": "chosen", "rejected": "rejected"}


def test_the_identity_is_of_contents_and_not_of_places(tmp_path: Path) -> None:
    first, moved = (
        read_data_rows(DataSection(train=str(write_jsonl(tmp_path / name, singles())))) for name in ("a", "b/c")
    )
    assert first.identity == moved.identity
    changed = singles()
    changed[3]["image"] = picture(77)
    assert read_data_rows(DataSection(train=str(write_jsonl(tmp_path / "d", changed)))).identity != first.identity


Change = Callable[[list[dict[str, Any]]], None]


def _set(key: str, value: Any) -> Change:
    return lambda rows: rows[2].__setitem__(key, value)


def _repeat(rows: list[dict[str, Any]]) -> None:
    rows[2] = dict(rows[0])


def _started() -> list[dict[str, Any]]:
    return [{**row, "start": picture(50 + number)} for number, row in enumerate(singles())]


RATED = {"rating": "stars", "scale": (1, 5)}
BAD: list[tuple[Callable[[], list[dict[str, Any]]], dict[str, Any], Change, str]] = [
    (singles, {}, _set("prompt", " "), "line 3: the prompt is empty"),
    (
        singles,
        {},
        _set("prompt", 7),
        "line 3: the prompt is a number.* or set data.columns.prompt to a column of texts",
    ),
    (
        singles,
        {},
        lambda rows: rows[2].pop("prompt"),
        "no 'prompt'; it has image.* or set data.columns.prompt to another",
    ),
    (
        singles,
        {},
        lambda rows: rows[2].pop("image"),
        "line 3 has no 'image'.* or set data.columns.sample to another column",
    ),
    (
        _started,
        {"prompt_image": "start"},
        lambda rows: rows[2].pop("start"),
        "no 'start'.* set data.columns.prompt_image to",
    ),
    (singles, {}, _set("image", "nowhere.png"), "line 3: .*nowhere.png' does not exist"),
    (singles, {}, _set("image", "../secret.png"), "line 3: .*below the folder"),
    (singles, {}, _set("image", "/etc/secret.png"), "line 3: .*below the folder"),
    (singles, {}, _repeat, "line 3 repeats .*line 1"),
    (pairs, PAIRED, lambda rows: rows[2].__setitem__("rejected", rows[2]["chosen"]), "line 3: chosen and rejected"),
    (pairs, PAIRED, _set("tie", "yes"), "line 3 is a tie"),
    (
        pairs,
        PAIRED,
        lambda rows: rows[2].pop("rejected"),
        "line 3 has no 'rejected'.* or set data.columns.rejected to",
    ),
    (rated, RATED, _set("stars", 6), "line 3: the rating 'stars' is 6, but the scale is 1.0 to 5.0.* set data.scale"),
    (rated, RATED, _set("stars", "good"), r"line 3: the rating 'stars' is 'good', no number\. Mend the row"),
    (rated, RATED, _set("stars", None), r"line 3: the rating 'stars' is None, no number\. Mend the row"),
    (rated, RATED, _set("stars", True), r"line 3: .* is True, which is 1, but the scale is 1.0 to 5.0\..*to \[0, 1\]"),
]


@pytest.mark.parametrize(("rows", "options", "change", "message"), BAD)
def test_a_row_that_cannot_be_used_is_named_or_left_out(
    tmp_path: Path, rows: Callable[[], list[dict[str, Any]]], options: dict[str, Any], change: Change, message: str
) -> None:
    made = rows()
    change(made)
    source = str(write_jsonl(tmp_path, made))
    with pytest.raises(DataError, match=message):
        read_data_rows(DataSection(train=source, **options))
    found = read_data_rows(DataSection(train=source, bad_rows="leave_out", **options))
    assert len(found.rows) == len(made) - 1
    ((place, reason),) = found.refused
    assert "line 3" in place
    assert re.search(message, reason)


@pytest.mark.parametrize("kind", [DataSection, HeldOutSection, JudgmentRows])
def test_reasons_name_settings_that_the_config_has(tmp_path: Path, kind: type[DataSection]) -> None:
    """The columns of judgments have no settings; their prompts come without images."""
    cases = [case for case in BAD if kind.trained or "prompt_image" not in case[1]]
    for rows, options, change, _ in cases:
        made = rows()
        change(made)
        section = kind.model_validate({"train": str(write_jsonl(tmp_path, made)), "bad_rows": "leave_out", **options})
        for place, reason in read_data_rows(section).refused:
            named = re.findall(r"\b(?:data|prompts)\.\w+", reason.replace(place, ""))
            assert {*named} <= {f"data.{name}" for name in DataSection.model_fields if section.trained}


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", ""), ("rows.csv", "prompt,image\n"), ("rows.tar", None)])
def test_a_source_without_rows_is_named_with_a_remedy(tmp_path: Path, name: str, content: str | None) -> None:
    if content is None:
        tarfile.open(tmp_path / name, "w").close()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"'.*{name}' holds no row\. Write some into it, or name another\.$"):
        read_data_rows(DataSection(train=str(tmp_path / name), bad_rows="leave_out"))


def test_a_split_that_is_not_there_is_named_with_the_setting_of_the_rows(tmp_path: Path) -> None:
    saved = datasets.load_from_disk(write_form("datasets", tmp_path / "one"))
    datasets.DatasetDict({"first": saved}).save_to_disk(tmp_path / "both")
    for kind, remedy in ((DataSection, "Set data.split, or name"), (JudgmentRows, "Name")):
        with pytest.raises(DataError, match=rf"it has first\. {remedy} the folder of a split, as"):
            read_data_rows(kind.model_validate({"train": str(tmp_path / "both")}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chosen": "a"}, "belong together"),
        ({"chosen": "a", "rejected": "b", "rating": "c"}, "belongs to single samples"),
        ({"scale": (1, 1)}, "must be the lower one"),
        ({"scale": (0, 5), "neutral": 7}, "outside data.scale"),
    ],
)
def test_settings_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSection(train="rows.jsonl", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"{", "line 1 is not JSON"),
        ("rows.parquet", b"none", "is not a Parquet file"),
        ("rows.tar", b"none", "cannot be read as a WebDataset tar"),
    ],
)
def test_a_damaged_source_is_one_message(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_data_rows(DataSection(train=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.tar"])
def test_a_source_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|cannot be read"):
        read_data_rows(DataSection(train=str(tmp_path / name)))


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Returns a bucket with the tars of ``write_form`` below ``data/``."""
    use(monkeypatch, s3_server.variables())
    name = make_bucket()
    write_form("tars", tmp_path / "tars")
    for tar in (tmp_path / "tars").iterdir():
        s3fs.S3FileSystem().put_file(str(tar), f"{name}/data/{tar.name}")
    return name


@pytest.mark.parametrize("form", ["part-0[01].tar", "LOCAL/part-00.tar::THERE/part-01.tar"])
def test_tars_on_s3_hold_the_same(bucket: str, tmp_path: Path, form: str) -> None:
    there = f"s3://{bucket}/data"
    local = read_data_rows(DataSection(train=str(tmp_path / "tars" / "part-{00..01}.tar")))
    source = form if form.startswith("LOCAL") else f"THERE/{form}"
    found = read_data_rows(DataSection(train=source.replace("THERE", there).replace("LOCAL", str(tmp_path / "tars"))))
    assert found.identity == local.identity
    assert [row.samples[0].read() for row in found.rows] == [row.samples[0].read() for row in local.rows]


def test_tars_on_s3_that_are_missing_or_changed(bucket: str, tmp_path: Path) -> None:
    for name, message in (
        ("no.tar", "does not exist"),
        ("no-*.tar", "no file matches"),
        ("part-{00..02}.tar", "02.tar"),
    ):
        with pytest.raises(DataError, match=message):
            read_data_rows(DataSection(train=f"s3://{bucket}/data/{name}", bad_rows="leave_out"))
    with pytest.raises(DataError, match="there is no bucket"):
        read_data_rows(DataSection(train="s3://not-a-bucket-of-mine/a.tar"))
    found = read_data_rows(DataSection(train=f"s3://{bucket}/data/part-00.tar"))
    s3fs.S3FileSystem().pipe_file(f"{bucket}/data/part-00.tar", b"short")
    with pytest.raises(DataError, match=r"part-00.tar' cannot be read: .*too short|cannot be read"):
        found.rows[0].samples[0].read()


def test_a_connection_that_breaks_loses_nothing(
    bucket: str, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"s3://{bucket}/data/part-*.tar"
    expected = read_data_rows(DataSection(train=str(tmp_path / "tars" / "part-*.tar")))
    faults = Faults(share=0.3, seed=1, kinds=("503", "reset", "truncated"))
    with unreliable(s3_server, faults) as endpoint:
        use(monkeypatch, s3_server.variables(endpoint))
        s3fs.S3FileSystem.clear_instance_cache()
        remote._bucket.cache_clear()
        found = read_data_rows(DataSection(train=source))
        contents = [row.samples[0].read() for row in found.rows]
    remote._bucket.cache_clear()
    assert sum(faults.counts.values()) > 0
    assert found.identity == expected.identity
    assert contents == [row.samples[0].read() for row in expected.rows]


def test_patterns_are_relative_to_the_config(tmp_path: Path) -> None:
    write_form("tars", tmp_path / "tars")
    data = {"data": {"train": "tars/part-{00..01}.tar::tars/part-*.tar::s3://b/x.tar"}}
    found = resolve_paths(data, tmp_path)["data"]["train"]
    assert found == f"{tmp_path}/tars/part-{{00..01}}.tar::{tmp_path}/tars/part-*.tar::s3://b/x.tar"
    rows = {"data": {"train": "tars/train-*.parquet"}}
    assert resolve_paths(rows, tmp_path)["data"]["train"] == f"{tmp_path}/tars/train-*.parquet"
