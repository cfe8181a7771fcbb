"""Clips with sound are heard wherever a run is shown."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

import flowmill
from flowmill.configs.load import load_config
from flowmill.storage.trajectories.base import Sample
from flowmill.storage.trajectories.media import Sound
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.metrics.samples import film_of
from flowmill.tasks.reports.report import run_report
from tests.conftest import ROOT
from tests.support.folder_files import FolderFiles
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.trajectories import write_samples


def streams(film: bytes) -> tuple[list[str], float]:
    """Return the codecs of a file, and the seconds of its sound."""
    with av.open(io.BytesIO(film)) as container:
        names = [stream.codec_context.name for stream in container.streams]
        frames = [frame.samples for frame in container.decode(audio=0)]
        return names, sum(frames) / container.streams.audio[0].rate


def test_a_film_is_what_every_player_takes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clip, plain = rng.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8), {"prompt": "x", "epoch": 1, "replica": 0}
    sound = Sound(samples=rng.integers(-9999, 9999, (6000, 2), dtype=np.int16), rate=16000)
    ids: dict[str, Any] = {"prompt_id": "p", "group_id": "p", "seed": 1, "policy": "policies/x", "sigmas": [1.0, 0.0]}
    heard, silent = (
        Sample(sample_id=f"e-{n}", media=clip, sound=each, **ids, **plain) for n, each in enumerate((sound, None))
    )
    write_samples(WebDatasetStore(), tmp_path, [heard, silent])
    shard = WebDatasetStore().open(FolderFiles(tmp_path))
    film = film_of(shard, 0, fps=24)
    assert film is not None
    names, seconds = streams(film)
    assert names == ["h264", "aac"]
    # AAC fills its last frame of 1024 samples, and puts one before.
    assert 6000 / 16000 <= seconds <= (6000 + 2 * 1024) / 16000
    assert film_of(shard, 1, fps=24) is None


@pytest.mark.campaign
def test_reports_pages_and_tracked_clips_have_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs" / "tiny_ltx2.yaml", [f"store.root={tmp_path / 'store'}", "run.epochs=1"])
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    films = re.findall(r'<video controls src="data:video/mp4;base64,([^"]+)"', run_report(context))
    assert films
    tracked = sorted((tmp_path / "store").rglob("clips/*.mp4"))
    assert tracked
    run = flowmill.open(str(tmp_path / "store")).run(config.run.name)
    ids = run.samples(1).to_pandas().sample_id
    assert sorted(run.films(1)) == sorted(ids)
    for film in [base64.b64decode(films[0]), tracked[0].read_bytes(), run.films(1)[ids[0]]]:
        assert streams(film)[0] == ["h264", "aac"]
    page = str(ROOT / "flowmill" / "explorer" / "page.py")
    monkeypatch.setattr(sys, "argv", [page, str(tmp_path / "store"), config.run.name, ""])
    shown = AppTest.from_file(page, default_timeout=60).run()
    next(button for button in shown.button if button.label == "Open").click().run()
    assert not shown.exception
    assert len(shown.get("video")) == 1
