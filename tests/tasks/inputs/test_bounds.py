"""Small files take little memory, whatever they claim: each form is read in a process of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError, PromptError
from flowmill.configs.schema import PromptsSection
from flowmill.storage.backends import range_hash_cache
from flowmill.storage.backends.range_hash_cache import RangeHashes
from flowmill.tasks.inputs.data_rows import read_data_rows
from flowmill.tasks.inputs.prompts import read_prompts
from flowmill.tasks.inputs.rows.arrow_bounds import bounded_parts
from flowmill.tasks.inputs.rows.bounds import MOST_TEXT

#: Reads a file of each line of its input in a process of its own, forked after all imports: what it says, and the MiB
#: by which the highest memory of that process grew.
_READ = """
import os, sys
from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.tasks.inputs.rows import tables
from flowmill.tasks.inputs.data_rows import read_data_rows
from flowmill.tasks.runtime.process_memory import process_peak
for line in sys.stdin:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    before = process_peak()
    try:
        found = read_data_rows(DataSection(train=line.strip(), sample="txt", bad_rows="leave_out"))
        said = f"{len(found.rows)} rows; {[reason for _, reason in found.refused][:1]}"
    except DataError as error:
        said = str(error)
    print(process_peak() - before >> 20, said.replace("\\n", " "), flush=True)
    os._exit(0)
"""
_TEXT = [json.dumps("t" * 1_000_000)]
#: Rows of a million characters: in memory they take more than a process may.
_ROWS = 320
_SAME = pa.DictionaryArray.from_arrays(pa.array(np.zeros(_ROWS, np.int32)), ["t" * 1_000_000])


def rows(note: pa.Array) -> pa.Table:
    """Return a table of given texts with another column."""
    count = len(note)
    return pa.table({"prompt": [f"p {number}" for number in range(count)], "txt": ["yes"] * count, "note": note})


def _parquet(folder: Path, note: pa.Array, **options: object) -> Path:
    parquet.write_table(rows(note), folder / "rows.parquet", compression="zstd", **options)
    return folder / "rows.parquet"


def _saved(folder: Path, note: pa.Array, compression: str | None = None) -> Path:
    table, options = rows(note), pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=options) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


def _pax(folder: Path) -> Path:
    path, about = folder / "rows.tar", tarfile.TarInfo("././@PaxHeader")
    about.type, about.size = tarfile.XHDTYPE, 400 << 20
    with path.open("wb") as file:
        file.write(about.tobuf() + b"419430400 a=")
        file.truncate(512 + about.size + 2048)
    return path


def _lines(name: str, begin: str, end: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with (folder / name).open("w") as file:
            file.write(begin)
            for _ in range(400):
                file.write("x" * (1 << 20))
            file.write(end)
        return folder / name

    return write


_OPTIONS = {"use_dictionary": ["note"], "dictionary_pagesize_limit": 1 << 30}
_JSON = '{"prompt": "a", "txt": "b"}\n'
BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "dictionary": (lambda folder: _parquet(folder, _SAME, **_OPTIONS), f"{_ROWS} rows; []"),
    "lists of a dictionary": (
        lambda folder: _parquet(
            folder,
            pa.ListArray.from_arrays(pa.array(range(0, _ROWS + 1, 20), pa.int32()), _SAME.dictionary_decode()),
            use_dictionary=True,
            dictionary_pagesize_limit=1 << 30,
        ),
        "row 1: the column 'note' has 20,001,312 bytes, more than 16,777,216",
    ),
    "one cell": (
        lambda folder: _parquet(
            folder,
            pa.ListArray.from_arrays(pa.array([0, 60_000_000, 60_000_001], pa.int32()), np.zeros(60_000_001, np.int8)),
        ),
        '1 rows; ["data.train: ',
    ),
    "one page": (
        lambda folder: _parquet(folder, pa.array(["0" * _ROWS * 1_000_000]), use_dictionary=False),
        "row group 1: the column 'note' takes 320,",
    ),
    "dictionary of JSON": (
        lambda folder: _parquet(
            folder, pa.ExtensionArray.from_storage(pa.json_(), pa.array(_TEXT * _ROWS)), **_OPTIONS
        ),
        f"{_ROWS} rows; []",
    ),
    "several files": (lambda folder: _parquet(folder, _SAME, **_OPTIONS).with_name("*.parquet"), f"{_ROWS} rows; []"),
    "saved dictionary": (lambda folder: _saved(folder, _SAME), f"{_ROWS} rows; []"),
    "saved and compressed": (
        lambda folder: _saved(folder, pa.array(["0" * _ROWS * 1_000_000]), "zstd"),
        "it is compressed, so its size in memory is not known",
    ),
    "header of a tar": (_pax, "a member has headers of more than 17,825,792 bytes"),
    "line of JSON": (
        _lines("rows.jsonl", _JSON + '{"prompt": "', '"}\n' + _JSON.replace("a", "c")),
        "2 rows; ['data.train: ",
    ),
    "line of CSV": (_lines("rows.csv", "prompt,txt\na,b\n", "\nc,d\n"), "2 rows; ['data.train: "),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[Callable[[Path], tuple[int, str]]]:
    """Returns the memory and the words of a process that reads a file."""
    command = [sys.executable, "-c", _READ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def read(path: Path) -> tuple[int, str]:
            process.stdin.write(f"{path}\n")
            mib, said = process.stdout.readline().split(" ", 1)
            return int(mib), said

        yield read
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.campaign_cases("dictionary of JSON", "several files")
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_memory(tmp_path: Path, reader: Callable[[Path], tuple[int, str]], name: str) -> None:
    write, expected = BOMBS[name]
    mib, said = reader(write(tmp_path))
    assert expected in said
    # The levels and values of a cell of 60 million numbers are decoded before they can be counted.
    assert mib < (1000 if name == "one cell" else 250)


def test_prompts_are_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\n" + "x" * (MOST_TEXT + 5) + "\nc\n")
    with pytest.raises(PromptError, match="line 2 has more than 16,777,216 characters"):
        read_prompts(str(path), PromptsSection(train=str(path)), where="prompts.train")


@pytest.mark.parametrize("size", [MOST_TEXT - 1, MOST_TEXT, 2 * MOST_TEXT, 2 * MOST_TEXT + 1])
def test_lines_after_a_long_one_keep_their_numbers(tmp_path: Path, size: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(_JSON + "x" * size + "\n" + "{\n" + _JSON.replace("a", "c"))
    found = read_data_rows(DataSection(train=str(path), sample="txt", bad_rows="leave_out"))
    assert [row.text for row in found.rows] == ["a", "c"]
    assert [place.rsplit(" ", 1)[1] for place, _ in found.refused] == ["2", "3"]


_CELLS = [
    pa.array(["a", None, "bcd"]),
    pa.array([b"a", None, b"bcd"], pa.large_binary()),
    pa.array([[1, 2], None, []], pa.list_(pa.int8())),
    pa.array([["a"], [None, "bc"], []], pa.large_list(pa.string())),
    pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
    pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "yz"}]),
    pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
    pa.array(["a", None, "bcd"]).dictionary_encode(),
    pa.array([None, None, None]),
    pa.array([True, None, False]),
    pa.array([1.5, None, 2.5]),
]


@pytest.mark.parametrize("cells", _CELLS, ids=lambda cells: str(cells.type))
@pytest.mark.parametrize("first", [0, 1])
def test_parts_of_a_batch_are_the_batch(monkeypatch: pytest.MonkeyPatch, cells: pa.Array, first: int) -> None:
    """Every type of cells is counted, also in a slice of a column, and no row is lost between parts."""
    batch = pa.RecordBatch.from_arrays([cells], ["x"]).slice(first)
    for most in (1, 100, 1 << 24):
        monkeypatch.setattr("flowmill.tasks.inputs.rows.arrow_bounds._BATCH_BYTES", most)
        parts = [part for part, complaint in bounded_parts(batch) if not complaint]
        assert [value for part in parts for value in part.column(0).to_pylist()] == cells.to_pylist()[first:]
        assert len(parts) == (len(batch) if most == 1 else len(parts))


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_view(pa.int8()), pa.run_end_encoded(pa.int32(), pa.int8())])
def test_cells_without_a_bound_are_refused(kind: pa.DataType) -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(2, kind)], ["x"])
    with pytest.raises(ValueError, match="is not read"):
        list(bounded_parts(batch))


def tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return path


def test_notes_of_macs_are_no_rows(tmp_path: Path) -> None:
    rows = {f"./{number}.{end}": f"{number}{end}".encode() for number in range(2) for end in ("png", "prompt")}
    notes = {"./._0.png": b"\0", "./._0.prompt": b"\0", "__MACOSX/._1.png": b"\0", "./.DS_Store": b"\0"}
    found = read_data_rows(DataSection(train=str(tar(tmp_path / "rows.tar", notes | rows))))
    assert ([row.text for row in found.rows], len(found.refused)) == (["0prompt", "1prompt"], 0)
    for name, content in (notes | rows).items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name.replace("prompt", "txt")).write_bytes(content)
    found = read_data_rows(DataSection(train=str(tmp_path / "folder")))
    assert ([row.text for row in found.rows], len(found.refused)) == (["0prompt", "1prompt"], 0)


def test_rows_of_tars_are_known_by_content(tmp_path: Path) -> None:
    one = tar(tmp_path / "a.tar", {"0.png": b"image", "0.prompt": b"a"})
    other = tar(tmp_path / "b.tar", {"x.png": b"other", "x.prompt": b"z", "7.png": b"image", "7.prompt": b"a"})
    (tmp_path / "0.png").write_bytes(b"image")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "image": "0.png"}\n')
    found = [read_data_rows(DataSection(train=str(path))) for path in (one, other, tmp_path / "rows.jsonl")]
    assert found[0].rows[0].samples[0].key == found[1].rows[1].samples[0].key == found[2].rows[0].samples[0].key
    assert found[0].identity == found[2].identity
    with pytest.raises(DataError, match=r"b\.tar, row 2 repeats .*a\.tar, row 1"):
        read_data_rows(DataSection(train=f"{one}::{other}"))
    one.write_bytes(one.read_bytes().replace(b"image", b"imagf"))
    with pytest.raises(DataError, match="was changed since the rows were read"):
        found[0].rows[0].samples[0].read()


def test_hashes_of_ranges_are_cached_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(range_hash_cache, "YOUNG_NS", 0)
    path, ranges = tmp_path / "file", [(0, 3), (3, 2), (5, 4)]
    path.write_bytes(b"abcdefghi")
    read = list[tuple[int, int]]()
    whole = RangeHashes._hash

    def noted(self: RangeHashes, offset: int, size: int) -> bytes:
        read.append((offset, size))
        return whole(self, offset, size)

    monkeypatch.setattr(RangeHashes, "_hash", noted)

    def hashes(wanted: list[tuple[int, int]]) -> list[str]:
        read.clear()
        with path.open("rb") as file, RangeHashes(file, path) as found:
            return [found.of(*each) for each in wanted]

    first = hashes(ranges)
    assert (len(set(first)), read) == (3, ranges)
    # A part that is read alone leaves the rest.
    assert (hashes(ranges[:1]), read) == (first[:1], [])
    assert (hashes(ranges), read) == (first, [])
    assert (hashes([ranges[0], ranges[2]]), read) == ([first[0], first[2]], [ranges[2]])
    path.write_bytes(b"abcdefghj!")
    assert (hashes(ranges)[:2], read) == (first[:2], ranges)
    with pytest.raises(OSError, match="ends 5 bytes before"):
        hashes([(5, 10)])


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_columns_of_json_are_decoded_in_each_file(tmp_path: Path, use_dictionary: bool) -> None:
    values = [{"a": [1, "x"]}, None, "t", 3]
    cells = pa.ExtensionArray.from_storage(pa.json_(), pa.array([each and json.dumps(each) for each in values]))
    lists = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), cells)
    table = rows(pa.StructArray.from_arrays([cells, lists], ["cell", "list"])).append_column("plain", cells)
    for number in range(2):
        part = table.set_column(0, "prompt", pa.array([f"{number} {row}" for row in range(4)]))
        parquet.write_table(part, tmp_path / f"{number}.parquet", use_dictionary=use_dictionary)
    found = read_data_rows(DataSection(train=str(tmp_path / "*.parquet"), sample="txt")).rows
    expected = [{"note": {"cell": each, "list": [each]}, "plain": each} for each in values]
    assert [dict(row.metadata) for row in found] == expected * 2
