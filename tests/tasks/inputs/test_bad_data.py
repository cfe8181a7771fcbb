"""Data that is damaged or made to harm: each bad row is one message with file and row, and the others are used."""

from __future__ import annotations

import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowmill.configs.data import DataSection, HeldOutSection
from flowmill.configs.errors import DataError
from flowmill.configs.reward_fit import JudgmentRows
from flowmill.tasks.inputs.data_rows import DataRows, read_data_rows
from flowmill.tasks.inputs.rows.bounds import MOST_BYTES, MOST_TEXT
from tests.support.given import TEXTS, picture, png, singles, write_jsonl

Line = bytes | dict[str, Any]
GOOD: list[Line] = [{"prompt": f"p{number}", "text": f"t{number}", "stars": 3} for number in range(4)]
TEXT = {"sample": "text"}
RATED = {**TEXT, "rating": "stars", "scale": (1, 5)}
DEEP = b'{"prompt": "p", "text": "t", "deep": ' + b"[" * 900 + b"]" * 900 + b"}"


def both_ways(source: Path | str, options: dict[str, Any], message: str) -> DataRows:
    """Return the rows without the one bad row, which is named with a message otherwise."""
    with pytest.raises(DataError, match=message) as caught:
        read_data_rows(DataSection(train=str(source), **options))
    assert "data.bad_rows to 'leave_out'" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    found = read_data_rows(DataSection(train=str(source), bad_rows="leave_out", **options))
    ((place, reason),) = found.refused
    assert re.search(message, reason), reason
    assert re.search(r"((line|row) \d+|\.png)$", place)
    return found


LINES: dict[str, tuple[Line, dict[str, Any], str]] = {
    "no JSON": (b'{"prompt": ', TEXT, "line 3 is not JSON"),
    "no object": (b"[1]", TEXT, "line 3 holds list"),
    "bytes that are no text": (b'{"prompt": "\xff", "text": "t"}', TEXT, "line 3 is not UTF-8 text"),
    "half a character": (b'{"prompt": "p", "text": "\\ud800"}', TEXT, "line 3, text has half a character"),
    "a NUL": (b'{"prompt": "p\0", "text": "t"}', TEXT, "line 3 holds NUL"),
    "a number that is none": (b'{"prompt": "p", "text": "t", "n": NaN}', TEXT, "line 3 is not JSON"),
    "an infinite number": (b'{"prompt": "p", "text": "t", "n": 1e999}', TEXT, "line 3: columns must be plain JSON"),
    "nested without end": (b"[" * 100_000, TEXT, "line 3 is not JSON"),
    "empty prompt": ({"prompt": "\n", "text": "t"}, TEXT, "line 3: the prompt is empty"),
    "empty text": ({"prompt": "p", "text": ""}, TEXT, "line 3 has no 'text'"),
    "spaces only": ({"prompt": "p", "text": " \t\n"}, TEXT, "line 3 has no 'text'"),
    "a text that is a number": ({"prompt": "p", "text": 7}, TEXT, "line 3 has a number as 'text', not .*. Mend it, or"),
    "no text": ({"prompt": "p", "text": None}, TEXT, "line 3 has no 'text'"),
    "a truth value as text": ({"prompt": "p", "text": True}, TEXT, "line 3 has a truth value as 'text'"),
    "an object as text": ({"prompt": "p", "text": {"a": 1}}, TEXT, "line 3 has an object as 'text'"),
    "the same row": (GOOD[0], TEXT, "line 3 repeats .*line 1"),
    "too good": ({"prompt": "p", "text": "t", "stars": 5.01}, RATED, "line 3: the rating 'stars' is 5.01"),
    "no rating": (
        {"prompt": "p", "text": "t"},
        RATED,
        "line 3 has no 'stars', the rating. Add it, or set data.columns.rating",
    ),
    "a rating without end": (
        b'{"prompt": "p", "text": "t", "stars": 1e999}',
        RATED,
        "line 3: the rating 'stars' is inf",
    ),
    "a huge rating": ({"prompt": "p", "text": "t", "stars": 10**400}, RATED, "line 3: the rating 'stars' is 1000"),
    "a rating that is no number": ({"prompt": "p", "text": "t", "stars": "nan"}, RATED, "line 3: the rating 'stars'"),
    "a name with a NUL": (b'{"prompt": "p", "text": "a\\u0000.png"}', TEXT, "line 3: .* no path below"),
    "a name as long as a book": ({"prompt": "p", "text": "a" * 5000 + ".png"}, TEXT, "line 3: "),
    "a path out": ({"prompt": "p", "text": "../x.png"}, TEXT, "line 3: .*below the folder"),
}


@pytest.mark.parametrize("kind", list(LINES))
def test_a_bad_line_costs_no_other(tmp_path: Path, kind: str) -> None:
    bad, options, message = LINES[kind]
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in (*GOOD[:2], bad, *GOOD[2:])]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    found = both_ways(tmp_path / "rows.jsonl", options, message)
    assert [row.text for row in found.rows] == [row["prompt"] for row in GOOD if isinstance(row, dict)]


def test_deeply_nested_columns_cost_no_other_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a", "text": "b"}\n' + DEEP)
    found = read_data_rows(DataSection(train=str(tmp_path / "rows.jsonl"), bad_rows="leave_out", **TEXT))
    assert len(found.rows) + len(found.refused) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"p,t,more", "line 4 has 3 values"),
        (b"p", "line 4 has 1 values"),
        (b'"p" x,t', "line 4 cannot be read"),
        (b"p," + b"t" * 200_000, "line 4 cannot be read: field larger"),
        (b"\xff,t", "line 4 is not UTF-8"),
        (b"p\0,t", "line 4 holds NUL"),
        (b",t", "line 4: the prompt is empty"),
    ],
)
def test_a_bad_line_of_a_table_costs_no_other(tmp_path: Path, bad: bytes, message: str) -> None:
    lines = [b"prompt,text", b"p0,t0", b"p1,t1", bad, b"p2,t2"]
    (tmp_path / "rows.csv").write_bytes(b"\r\n".join(lines) + b"\r\n")
    assert [row.text for row in both_ways(tmp_path / "rows.csv", TEXT, message).rows] == ["p0", "p1", "p2"]


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_out(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_folder, "no regular file"),
        (_pipe, "no regular file"),
        (_link_out, "leads out of"),
        (_circle, "line 3: "),
        (_huge, "has 1,073,741,825 bytes, more than"),
    ],
)
def test_a_file_that_is_none_costs_no_other(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    source = write_jsonl(tmp_path, singles())
    (tmp_path / "2-image.png").unlink()
    make(tmp_path / "2-image.png")
    assert len(both_ways(source, {}, message).rows) == len(TEXTS) - 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe\0", "codec can't decode"),
        (b"x" * (MOST_TEXT + 1), "it has 16,777,217 bytes, more than 16,777,216"),
        (b" \n", "it is empty"),
        (None, "it is missing"),
    ],
    ids=["no text", "too long", "empty", "missing"],
)
def test_a_caption_that_cannot_be_used_costs_no_other(tmp_path: Path, content: bytes | None, why: str) -> None:
    for number in range(3):
        picture(number).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"picture {number}")
    (tmp_path / "1.txt").unlink() if content is None else (tmp_path / "1.txt").write_bytes(content)
    found = both_ways(tmp_path, {}, f"the text of .*/1.png' cannot be used: .*{why}.* Write '1.txt' next to it")
    assert [row.text for row in found.rows] == ["picture 0", "picture 2"]


def test_rows_of_a_folder_are_named_by_their_images_or_the_lines_of_its_list(tmp_path: Path) -> None:
    for number in range(3):
        picture(number % 2).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"picture {number % 2}")
    found = both_ways(tmp_path, {}, r"^data\.train: .*/2\.png repeats data\.train: .*/0\.png: the same prompt")
    assert [row.samples[0].name for row in found.rows] == [f"data.train: {tmp_path}/{name}.png" for name in (0, 1)]
    rows = [{"prompt": f"picture {number % 2}", "file_name": f"{number}.png"} for number in range(3)]
    (tmp_path / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    both_ways(tmp_path, {}, r"metadata\.jsonl, line 3 repeats .*metadata\.jsonl, line 1: the same prompt")


def test_cells_of_a_table(tmp_path: Path) -> None:
    images = [png(picture(number)) for number in range(5)]
    made = {"prompt": list("abcde"), "image": [*images[:2], None, *images[3:]]}
    pq.write_table(pa.table(made), tmp_path / "rows.parquet", row_group_size=2)
    found = both_ways(tmp_path / "rows.parquet", {}, "row 3 has no 'image'")
    files = [row.samples[0] for row in found.rows]
    order = [2, 0, 3, 1, 1]
    assert [files[place].read() for place in order] == [[*images[:2], *images[3:]][place] for place in order]
    made["image"][1] = images[4]
    pq.write_table(pa.table(made), tmp_path / "rows.parquet", row_group_size=2)
    again = read_data_rows(DataSection(train=str(tmp_path / "rows.parquet"), bad_rows="leave_out"))
    pq.write_table(pa.table({**made, "image": images}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 2, image was changed since the rows were read"):
        again.rows[1].samples[0].read()


def member(name: str, data: bytes = b"", *, size: int | None = None, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a member as bytes of a tar, of which header and content may disagree."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data) if size is None else size, kind, "/etc/passwd"
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def sample(stem: str, *others: bytes, number: int = 0) -> bytes:
    """Return the members of one usable row."""
    return (
        member(f"{stem}.png", png(picture(number)))
        + member(f"{stem}.prompt", stem[:40].encode("utf-8", "replace"))
        + b"".join(others)
    )


MEMBERS: dict[str, tuple[bytes, str]] = {
    "a symbolic link": (member("bad.png", kind=tarfile.SYMTYPE) + member("bad.prompt", b"p"), "'bad.png' is a link"),
    "a hard link": (member("bad.png", kind=tarfile.LNKTYPE) + member("bad.prompt", b"p"), "'bad.png' is a link"),
    "a device": (member("bad.png", kind=tarfile.CHRTYPE) + member("bad.prompt", b"p"), "a device"),
    "a pipe": (member("bad.png", kind=tarfile.FIFOTYPE) + member("bad.prompt", b"p"), "a device"),
    "a name of no text": (sample("bad\udcff"), "has a name that is not UTF-8"),
    "a text too long": (
        member("bad.prompt", b"x" * (MOST_TEXT + 1)) + member("bad.png", b"p"),
        "has 16,777,217 bytes, more than",
    ),
    "a text that is none": (member("bad.prompt", b"\xff\xfe") + member("bad.png", b"p"), "bad.prompt' .*can't decode"),
    "two of one name": (sample("bad") + member("bad.png", b"p"), "repeats 'image' of the same sample"),
    "JSON that is none": (sample("bad", member("bad.json", b"{")), "'bad.json' "),
    "JSON that is a list": (sample("bad", member("bad.json", b"[1]")), "'bad.json' holds list, not an object"),
    "a prompt alone": (member("bad.prompt", b"p"), "row 2 has no 'image'"),
    "an image alone": (member("bad.png", b"p"), "row 2 has no 'prompt'"),
}


@pytest.mark.parametrize("kind", list(MEMBERS))
def test_a_bad_member_of_a_tar_costs_no_other_row(tmp_path: Path, kind: str) -> None:
    bad, message = MEMBERS[kind]
    (tmp_path / "rows.tar").write_bytes(sample("first") + bad + sample("last", number=1) + bytes(1024))
    found = both_ways(tmp_path / "rows.tar", {}, f"row 2.*{message}" if "row 2" not in message else message)
    assert [row.text for row in found.rows] == ["first", "last"]
    assert found.rows[1].samples[0].read() == png(picture(1))


@pytest.mark.parametrize("name", ["/etc/passwd", "../../up", "./a/../b", "n" * 300, "f/" * 200 + "x", "é", "a b\tc"])
def test_names_in_tars_are_no_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.tar").write_bytes(sample(name) + bytes(1024))
    (row,) = read_data_rows(DataSection(train=str(tmp_path / "rows.tar"))).rows
    assert row.samples[0].read() == png(picture(0))
    assert os.listdir(tmp_path) == ["rows.tar"]


@pytest.mark.parametrize(
    "damage",
    [
        member("bad.png", b"x", size=10**15),
        member("bad.png", b"x", size=-(10**9)),
        member("bad.png", b"x", size=-tarfile.BLOCKSIZE),
        b"\xff" * 512,
        member("bad.txt", b"x" * 1000)[:700],
        member("bad.txt")[:300],
        b"",
    ],
    ids=["too large", "negative", "negative by a block", "no header", "cut off", "cut header", "cut between"],
)
def test_a_damaged_tar_gives_the_rows_before(tmp_path: Path, damage: bytes) -> None:
    """But not the row next to the damage, which may have had more members."""
    (tmp_path / "a-0.tar").write_bytes(sample("first") + sample("bad", number=2) + damage)
    (tmp_path / "a-1.tar").write_bytes(sample("last", number=1) + bytes(1024))
    begun = time.monotonic()
    found = both_ways(tmp_path / "a-{0..1}.tar", {}, "a-0.tar, row 2: .*cannot be read as a WebDataset tar")
    assert [row.text for row in found.rows] == ["first", "last"]
    assert time.monotonic() - begun < 5


def test_held_out_prompts_are_no_rows(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path, [{"prompt": "A  Cat", "text": "1"}, {"prompt": "a dog", "text": "2"}]))
    heldout = frozenset({("a cat", None)})
    with pytest.raises(DataError, match=r"line 1: the prompt 'A  Cat' is in prompts.heldout too"):
        read_data_rows(DataSection(train=source, **TEXT), heldout)
    found = read_data_rows(DataSection(train=source, bad_rows="leave_out", **TEXT), heldout)
    assert [row.text for row in found.rows] == ["a dog"]


def test_messages_name_the_setting_of_the_rows(tmp_path: Path) -> None:
    for kind in (DataSection, HeldOutSection, JudgmentRows):
        for missing in ("data.train.jsonl", "data.train.tar", "data.train-*.tar"):
            section = kind.model_validate({"train": str(tmp_path / missing), **TEXT})
            with pytest.raises(DataError) as caught:
                read_data_rows(section)
            assert str(caught.value).startswith(f"{section.setting}: ")
            assert f"'{tmp_path / missing}'" in str(caught.value)
        rows = write_jsonl(tmp_path, [{"prompt": "a", "text": None}])
        section = kind.model_validate({"train": str(rows), **TEXT, "bad_rows": "stop"})
        with pytest.raises(DataError, match=rf"^{section.setting}\b"):
            read_data_rows(section)


@pytest.fixture(params=["hangs", "fails"])
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provides a hub that never answers, or only with errors."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if request.param == "hangs":
                ended.wait(60)
            self.send_error(500)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("flowmill.tasks.inputs.rows.files._ANSWER_S", 0.5)
    yield
    ended.set()
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer_is_one_message_soon() -> None:
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"data.train: dataset 'owner/name' .*cannot be loaded: .*HF_HUB_OFFLINE"):
        read_data_rows(DataSection(train="owner/name"))
    assert time.monotonic() - begun < 10
