"""Messages that go into artifacts."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest

from flowmill.configs.errors import without_process


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (f"cannot identify image file {io.BytesIO()!r}", "cannot identify image file <_io.BytesIO object>"),
        (f"{io.BytesIO().read!r} of {object()!r}", "<built-in method read of _io.BytesIO object> of <object object>"),
        ("<bound method A.b of <a.A object at 0x7f03>>", "<bound method A.b of <a.A object>>"),
        ("[mov,mp4,m4a @ 0x55d0c8aaf00] moov atom not found", "[mov,mp4,m4a] moov atom not found"),
        ("[Errno 2] No such file: '/tmp/tmp3k_9x8ab/two.png'", "[Errno 2] No such file: '/tmp/tmp/two.png'"),
        ("the color at 0xffcc00 of /tmp/tmpfiles/two.png", "the color at 0xffcc00 of /tmp/tmpfiles/two.png"),
    ],
    # Names of tests are the same in every process; the messages are not.
    ids=["object", "method", "bound method", "decoder", "temporary folder", "no address"],
)
def test_a_message_for_an_artifact_says_nothing_of_its_process(message: str, kept: str) -> None:
    assert without_process(message) == kept


def test_temporary_names_of_python_are_known() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as first, tempfile.TemporaryDirectory(dir="/tmp") as second:
        assert first != second
        assert len({without_process(str(Path(folder) / "two.png")) for folder in (first, second)}) == 1
