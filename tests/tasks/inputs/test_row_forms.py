"""Every form in which people keep rows holds the same rows, with the same keys: one table of forms."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from huggingface_hub import HfApi

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError, PromptError
from flowmill.configs.schema import PromptsSection
from flowmill.tasks.inputs.data_rows import read_data_rows
from flowmill.tasks.inputs.prompts import read_prompts
from tests.conftest import ROOT
from tests.support.given import picture, png
from tests.support.s3 import Server, make_bucket, use

COUNT = 8
IMAGES = [png(picture(number)) for number in range(COUNT)]
ROWS = [{"prompt": f"q{number}", "image": f"{number}.png"} for number in range(COUNT)]
STRUCTS = [{"bytes": data, "path": None} for data in IMAGES]


def _images(folder: Path, captions: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(IMAGES):
        (folder / f"{number}.png").write_bytes(data)
        if captions:
            (folder / f"{number}{captions}").write_text(f"q{number}\n")
    return folder


def _table(folder: Path, name: str, sign: str = ",", sample: str = "image") -> Path:
    with (_images(folder) / name).open("w", newline="") as file:
        writer = csv.writer(file, delimiter=sign)
        writer.writerows([["prompt", sample], *(row.values() for row in ROWS)])
    return folder / name


def _lines(folder: Path, rows: Iterable[Mapping[str, Any]] = ROWS) -> Path:
    (_images(folder) / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "rows.jsonl"


def _array(folder: Path, indent: int | None) -> Path:
    (_images(folder) / "rows.json").write_text(json.dumps(ROWS, indent=indent))
    return folder / "rows.json"


def _packed(path: Path) -> Path:
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())
    path.unlink()
    return Path(f"{path}.gz")


def _parquet(folder: Path, images: list[Any], name: str = "rows.parquet") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    prompts = [row["prompt"] for row in ROWS]
    pq.write_table(pa.table({"prompt": prompts, "image": images}), folder / name, row_group_size=3)
    return folder / name


def _shards(folder: Path, name: str = "data/train-{:05}-of-00002.parquet") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for part in range(2):
        rows = [{**row, "image": STRUCTS[number]} for number, row in enumerate(ROWS)][4 * part : 4 * part + 4]
        pq.write_table(pa.Table.from_pylist(rows), folder / name.format(part))
    pq.write_table(pa.table({"prompt": ["other"], "image": [b"x"]}), folder / "data" / "test-00000-of-00001.parquet")
    return folder


def _snapshot(folder: Path) -> Path:
    (_shards(folder) / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n---\n# Rows\n"
    )
    (folder / "assets").mkdir()
    (folder / "assets" / "logo.png").write_bytes(IMAGES[0])
    return folder


def _saved(folder: Path, splits: bool) -> Path:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"prompt": [row["prompt"] for row in ROWS], "image": STRUCTS}, features=features)
    (datasets.DatasetDict({"test": rows.select([0]), "train": rows}) if splits else rows).save_to_disk(folder)
    return folder


def _members(path: Path, rows: range, text: str = "prompt", notes: bool = False, mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for number in rows:
            about = f"q{number}" if text != "json" else json.dumps({"prompt": f"q{number}"})
            files = {"png": IMAGES[number], text: about.encode()}
            if number % 3 == 0:
                files["npy"] = b"\x93NUMPY"
            for ending, data in files.items():
                for name in (
                    (f"._{number:04}.{ending}", f"{number:04}.{ending}") if notes else (f"{number:04}.{ending}",)
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def _tars(folder: Path, form: str = "{0..1}.tar", **how: Any) -> str:
    for part in range(2):
        _members(folder / f"{part}.tar", range(4 * part, 4 * part + 4), **how)
    return "::".join(f"{folder}/{each}" for each in form.split("::"))


def _tar(path: Path, **how: Any) -> Path:
    _members(path, range(COUNT), **how)
    return path


def _metadata(folder: Path, ending: str) -> Path:
    if ending == "csv":
        _table(folder, "metadata.csv", sample="file_name")
    elif ending == "jsonl":
        text = _lines(folder).read_text().replace('"image"', '"file_name"')
        (folder / "rows.jsonl").unlink()
        (folder / "metadata.jsonl").write_text(text)
    else:
        renamed = pq.read_table(_parquet(_images(folder), [row["image"] for row in ROWS])).rename_columns(
            ["prompt", "file_name"]
        )
        (folder / "rows.parquet").unlink()
        pq.write_table(renamed, folder / "metadata.parquet")
    return folder


#: Each form, as a function of a folder that returns ``data.train``; and further settings of data.
FORMS: dict[str, tuple[Callable[[Path], Path | str], dict[str, Any]]] = {
    "JSONL": (_lines, {}),
    "JSONL, gzip": (lambda at: _packed(_lines(at)), {}),
    "JSON array": (lambda at: _array(at, None), {}),
    "JSON array, indented": (lambda at: _array(at, 2), {}),
    "CSV with ','": (lambda at: _table(at, "rows.csv"), {}),
    "CSV, gzip": (lambda at: _packed(_table(at, "rows.csv")), {}),
    "CSV with ';'": (lambda at: _table(at, "rows.csv", ";"), {}),
    "TSV": (lambda at: _table(at, "rows.tsv", "\t"), {}),
    "Parquet, paths": (lambda at: _parquet(_images(at), [row["image"] for row in ROWS]), {}),
    "Parquet, bytes": (lambda at: _parquet(at, IMAGES), {}),
    "Parquet, structs of bytes and path": (lambda at: _parquet(at, STRUCTS), {}),
    "several Parquet files, glob": (lambda at: f"{_shards(at)}/data/train-*.parquet", {}),
    "several Parquet files, braces": (lambda at: f"{_shards(at)}/data/train-{{00000..00001}}-of-00002.parquet", {}),
    "a list of files": (lambda at: f"{_lines(at, ROWS[:4])}::{_array_of(at / 'b', ROWS[4:])}", {}),
    "snapshot of the hub": (_snapshot, {}),
    "the same without README.md": (_shards, {}),
    "save_to_disk, Dataset": (lambda at: _saved(at, False), {}),
    "save_to_disk, DatasetDict": (lambda at: _saved(at, True), {}),
    "folder of images and .txt": (lambda at: _images(at, ".txt"), {}),
    "folder of images and .caption": (lambda at: _images(at, ".caption"), {}),
    "imagefolder, metadata.csv": (lambda at: _metadata(at, "csv"), {}),
    "imagefolder, metadata.jsonl": (lambda at: _metadata(at, "jsonl"), {}),
    "imagefolder, metadata.parquet": (lambda at: _metadata(at, "parquet"), {}),
    "WebDataset, braces": (_tars, {}),
    "WebDataset, glob": (lambda at: _tars(at, "*.tar"), {}),
    "WebDataset, ::": (lambda at: _tars(at, "0.tar::1.tar"), {}),
    "WebDataset, .txt": (lambda at: _tar(at / "rows.tar", text="txt"), {"prompt": "txt"}),
    "WebDataset, .json only": (lambda at: _tar(at / "rows.tar", text="json"), {}),
    "WebDataset of a Mac": (lambda at: _tar(at / "rows.tar", notes=True), {}),
    "WebDataset of a Mac in a folder": (lambda at: _tar(at / "rows.tar", notes=True).parent, {}),
    "WebDataset, tar.gz": (lambda at: _tar(at / "rows.tar.gz", mode="w:gz"), {}),
}


def _array_of(folder: Path, rows: list[dict[str, str]]) -> Path:
    (_images(folder) / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the identity of the rows."""
    return read_data_rows(DataSection(train=str(_lines(tmp_path_factory.mktemp("rows"))))).identity


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_holds_the_same_rows(form: str, tmp_path: Path, expected: str) -> None:
    write, settings = FORMS[form]
    found = read_data_rows(DataSection(train=str(write(tmp_path / "in")), **settings))
    assert [row.text for row in found.rows] == [row["prompt"] for row in ROWS]
    assert (len(found.refused), found.identity) == (0, expected)
    # Contents are read again in any order.
    for number in (*range(COUNT), 5, 2, 2):
        assert found.rows[number].samples[0].read() == IMAGES[number]


#: The documented sources and the forms they stand for; a dataset of the hub has a test of its own.
DOCUMENTED = {
    "rows.jsonl": "JSONL",
    "rows.jsonl.gz": "JSONL, gzip",
    "rows.json": "JSON array, indented",
    "rows.csv": "CSV with ';'",
    "rows.tsv": "TSV",
    "rows.parquet": "Parquet, bytes",
    "data/train-*.parquet": "several Parquet files, glob",
    "rows-{000..001}.tar": "WebDataset, braces",
    "a.jsonl::b.json": "a list of files",
    "rows.tar": "WebDataset of a Mac",
    "rows.tar.gz": "WebDataset, tar.gz",
    "pictures/": "folder of images and .caption",
    "imagefolder/": "imagefolder, metadata.parquet",
    "snapshot/": "snapshot of the hub",
    "saved/": "save_to_disk, Dataset",
}


def test_each_form_of_the_docs_is_one_of_these() -> None:
    page = (ROOT / "docs" / "own-data.md").read_text()
    (table,) = re.findall(r"^\| rows are in \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    sources = [source for line in table.splitlines() for source in re.findall(r"`([^`]+)`", line.split(" | ")[-1])]
    assert sources == [*DOCUMENTED, "owner/name"]
    assert {*DOCUMENTED.values()} <= FORMS.keys()


@pytest.mark.parametrize(
    "form", ["JSONL", "CSV, gzip", "Parquet, bytes", "WebDataset, tar.gz", "folder of images and .txt"]
)
def test_prompts_are_read_from_the_same_forms(form: str, tmp_path: Path) -> None:
    source = str(FORMS[form][0](tmp_path / "in"))
    section = PromptsSection(train=source, image="image")
    prompts = read_prompts(source, section, where="prompts.train")
    assert [prompt.text for prompt in prompts] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("row", "column", "text"),
    [
        ({"prompt": [{"role": "user", "content": "2+2="}]}, "prompt", "2+2="),
        ({"instruction": "Add", "input": "2 and 2"}, "{instruction}: {input}", "Add: 2 and 2"),
        ({"task": {"question": "2+2="}}, "task.question", "2+2="),
    ],
)
def test_a_prompt_is_a_message_a_template_or_inside_a_column(
    row: dict[str, Any], column: str, text: str, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({**row, "level": 1}))
    (prompt,) = read_prompts(str(source), PromptsSection(train=str(source), column=column), where="prompts.train")
    assert (prompt.text, prompt.metadata) == (text, {"level": 1})


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({"prompt": [{"role": "system", "content": "Add"}]}, "prompt", "prompt is a chat of system; a prompt is one"),
        ({"a": "x"}, "{a} {b}", "there is no column 'b' for the template"),
        ({"a": {"b": "x"}}, "a.c", "has no 'a.c'; it has a"),
    ],
)
def test_prompts_of_another_form_are_refused(row: dict[str, Any], column: str, reason: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row))
    with pytest.raises(PromptError, match=rf"^prompts.train: {source}, line 1.*{re.escape(reason)}"):
        read_prompts(str(source), PromptsSection(train=str(source), column=column), where="prompts.train")


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a bucket."""
    use(monkeypatch, s3_server.variables())
    return make_bucket()


@pytest.mark.parametrize(
    "form",
    [
        *("JSONL, gzip", "several Parquet files, glob", "WebDataset, ::", "WebDataset, tar.gz"),
        *("save_to_disk, DatasetDict", "folder of images and .txt"),
    ],
)
def test_forms_on_s3_hold_the_same(form: str, bucket: str, tmp_path: Path, expected: str) -> None:
    write, settings = FORMS[form]
    source = str(write(tmp_path / "in"))
    s3fs.S3FileSystem().put(str(tmp_path / "in"), f"{bucket}/rows", recursive=True)
    shutil.rmtree(tmp_path / "in")
    found = read_data_rows(DataSection(train=source.replace(str(tmp_path / "in"), f"s3://{bucket}/rows"), **settings))
    assert (len(found.refused), found.identity) == (0, expected)
    assert [row.samples[0].read() for row in found.rows] == IMAGES


def _in_cache(folder: Path, name: str) -> None:
    """Write a snapshot as the hub's client keeps it: links to blobs."""
    made, home = _snapshot(folder / "made"), folder / f"datasets--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    (home / "blobs").mkdir()
    for number, file in enumerate(path for path in sorted(made.rglob("*")) if path.is_file()):
        link = home / "snapshots" / "abc" / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(home / "blobs" / str(number))
        link.symlink_to(home / "blobs" / str(number))


def test_a_dataset_in_the_cache_of_the_hub_is_used_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"dataset 'me/rows' .*cannot be loaded: .*HF_HUB_OFFLINE=1"):
        read_data_rows(DataSection(train="me/rows"))
    _in_cache(tmp_path, "me/rows")
    found = read_data_rows(DataSection(train="me/rows"))
    assert found.identity == expected
    assert [row.samples[0].read() for row in found.rows] == IMAGES


def test_of_a_dataset_of_the_hub_only_the_split_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, wanted = _snapshot(tmp_path), list[str]()
    names = [str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()]

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        wanted.extend(allow_patterns)
        return str(made)

    about = HfApi.__new__(HfApi)
    about.sha, about.siblings = "abc", [type("File", (), {"rfilename": name}) for name in names]
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: about)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(made / "README.md"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert len(read_data_rows(DataSection(train="me/others")).rows) == COUNT
    assert sorted(wanted) == ["README.md", "assets/logo.png", *(f"data/train-0000{n}-of-00002.parquet" for n in (0, 1))]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"prompt": "a", "image": "0.png"}, {"prompt": ]', "row 2 is not JSON"),
        ('[{"prompt": "a", "image": "0.png"}, 7]', "row 2 holds int; a row is an object"),
        ('[{"prompt": "a", "image": "0.png"}', "row 2 is not JSON: the file ends inside the list"),
        ('[{"prompt": "a", "image": "0.png"} {}]', "row 2 is not JSON: the list does not end here"),
        ('[{"prompt": "a", "image": "0.png"}] x', "row 2 is not JSON: the list does not end here"),
        ('[{"prompt": "a", "image": "0.png"}, {"prompt": "' + "x" * 17_000_000, "row 2 is not JSON: it has more than"),
        ('{"prompt": "a", "image": "0.png"}\n{', "row 2.* is not JSON|line 2 is not JSON"),
    ],
)
def test_a_bad_array_costs_no_row_before(tmp_path: Path, content: str, reason: str) -> None:
    (_images(tmp_path) / "rows.json").write_text(content)
    found = read_data_rows(DataSection(train=str(tmp_path / "rows.json"), bad_rows="leave_out"))
    assert [row.text for row in found.rows] == ["a"]
    ((_, said),) = found.refused
    with pytest.raises(DataError, match=f"rows.json, ({reason})"):
        raise DataError(said)


def test_a_packed_file_that_is_cut_off_gives_the_rows_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "text": "é" * (number % 50)} for number in range(1, 4000) if number % 50]
    packed = _packed(_lines(tmp_path, rows))
    packed.write_bytes(packed.read_bytes()[:-200])
    found = read_data_rows(DataSection(train=str(packed), sample="text", bad_rows="leave_out"), texts=True)
    assert 0 < len(found.rows) < len(rows)
    assert "rows.jsonl.gz cannot be read after" in found.refused[-1][1]


def test_a_damaged_row_group_costs_no_other(tmp_path: Path) -> None:
    rows = pa.table(
        {"prompt": [f"p{number}" for number in range(40)], "image": [b"x" * 500 + b"%d" % n for n in range(40)]}
    )
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=10, compression="NONE", use_dictionary=False)
    column = pq.read_metadata(tmp_path / "rows.parquet").row_group(1).column(1)
    data = bytearray((tmp_path / "rows.parquet").read_bytes())
    data[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    (tmp_path / "rows.parquet").write_bytes(data)
    found = read_data_rows(DataSection(train=str(tmp_path / "rows.parquet"), bad_rows="leave_out"))
    assert len(found.rows) == 30
    assert "rows.parquet, rows 11 to 20 cannot be read" in found.refused[0][1]
