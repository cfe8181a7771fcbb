"""Equal clips give equal bytes, regardless of earlier encodings of the process."""

from __future__ import annotations

import numpy as np
import pytest

from flowmill.storage.trajectories.media import MediaFormat, decode


@pytest.mark.slow
@pytest.mark.parametrize("lossless", [True, False])
def test_a_clip_does_not_depend_on_those_before_it(lossless: bool) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    form, other = (MediaFormat(name="mp4", lossless=each, fps=16) for each in (lossless, not lossless))
    rng = np.random.default_rng(1)
    found = set()
    for _ in range(100):
        data = form.encode(clip)
        found.add(data)
        decode(data, "mp4", where="here")
        frames, height, width = rng.integers(1, 9), *(2 * rng.integers(4, 40, 2))
        before = rng.integers(0, 256, (frames, height, width, 3), np.uint8)
        other.encode(before)
        form.encode(before)
    assert len(found) == 1
    decoded = decode(found.pop(), "mp4", where="here").astype(int)
    # Lossy clips keep brightness; of colors they keep one for four pixels.
    shift = np.abs(decoded - clip) if lossless else np.abs(decoded.mean(-1) - clip.mean(-1))
    assert shift.mean() <= (0 if lossless else 20)
