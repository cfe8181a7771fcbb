"""PP-OCR on real rendered words it was tuned on by nobody here: several fonts, sizes and cases."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import score

pytest.importorskip("rapidocr_onnxruntime", reason="flowmill[ocr] is not installed")
font_manager = pytest.importorskip("matplotlib.font_manager", reason="the fonts are matplotlib's")

#: Words of everyday signs, chosen once; none is in the quickstart's list.
_LISTED = (
    "airport anchor avenue bakery balcony barber basket battery bicycle blossom bottle bridge bronze butcher "
    "cabin camera candle canyon castle cellar chapel cherry church cinema circus clinic coffee corner cotton "
    "county courage crystal danger dentist desert detour dinner doctor dragon elevator engine exhibit factory "
    "fashion ferry festival fiction fireman flower forest fountain freedom freight galaxy gallery garage garden "
    "ginger grocery guitar hammer harbor hardware harvest helmet history holiday hospital hostel island jacket "
    "jungle kitchen ladder laundry lemonade library lobster machine market meadow medicine mirror monument "
    "morning mountain museum notice ocean office orchard oxygen palace parking pepper platform quarry railway "
    "silver theater"
)
WORDS = tuple(_LISTED.split())
FONTS = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono", "STIXGeneral", "cmss10")


def sign(text: str, font: str, size: int, *, dark: bool) -> np.ndarray:
    """Draw a word in the middle of a sign of 512 by 256."""
    face = ImageFont.truetype(font_manager.findfont(font), size)
    ink, ground = ("white", (30, 60, 40)) if dark else ("black", (240, 238, 230))
    image = Image.new("RGB", (512, 256), ground)
    ImageDraw.Draw(image).text((256, 128), text, fill=ink, font=face, anchor="mm")
    return np.asarray(image)


@pytest.mark.parametrize(
    ("detect", "every"),
    [(False, 4), pytest.param(True, 14, marks=pytest.mark.slow), pytest.param(True, 1, marks=pytest.mark.campaign)],
)
def test_words_in_several_fonts_are_read_exactly(detect: bool, every: int) -> None:
    assert len(WORDS) == len(set(WORDS)) == 100
    texts = [word.upper() if number % 3 == 0 else word for number, word in enumerate(WORDS)]
    media = np.stack(
        [
            sign(text, FONTS[n % 5], (40, 56, 72)[n % 3] if len(text) < 8 else 48, dark=n % 2 == 0)
            for n, text in enumerate(texts)
        ]
    )
    texts, media = texts[::every], media[::every]
    prompts = [f'a sign that says "{text}"' for text in texts]
    if not detect:
        # Without looking for lines the whole image is one: what fills it is read.
        media = media[:, 80:176, 56:456]
    reward = make_reward("ocr", {"detect": detect, "substring": False, **({"min_side": 256} if detect else {})})
    found = score(reward, "ocr", Batch(media=media, prompts=prompts, metadata=[{}] * len(texts)))
    exact = [note.replace(" ", "").lower() == text.lower() for note, text in zip(found.notes or (), texts, strict=True)]
    missed = [f"{t}: {n}" for t, n, right in zip(texts, found.notes or (), exact, strict=True) if not right]
    assert np.mean(exact) >= 0.95, missed
    assert (found.values == 1.0).tolist() == exact
