"""Writes tables of images of two handwritten digits to configs/prompts: digits-pairs.parquet has right ones and ones of
other numbers, digit-edits-*.parquet an edit of each and the resulting number.

python -m tools.digit_pairs
"""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from flowmill.models.quickstart.corpus import digit_pairs

_FOLDER = Path(__file__).parents[1] / "configs" / "prompts"
_ROWS = 300


def main() -> None:
    """Write the tables; none of the pairs' prompts is held out, and no digit of held-out edits is in another table."""
    for name, rows in (("train", 512), ("heldout", 256)):
        pq.write_table(_edits(rows, heldout=name == "heldout"), _FOLDER / f"digit-edits-{name}.parquet")
    heldout = set((_FOLDER / "digits-heldout.txt").read_text().split())
    texts, images = digit_pairs(1000, seed=7)
    pairs: dict[tuple[str, bytes], bytes] = {}
    for number, text in enumerate(texts):
        other = (number * 7 + 13) % len(texts)
        if f'"{text}"' not in heldout and texts[other] != text:
            pairs.setdefault((f'"{text}"', _png(images[number])), _png(images[other]))
    kept = list(pairs.items())[:_ROWS]
    table = pa.table(
        {
            "prompt": [prompt for (prompt, _), _ in kept],
            "chosen": [chosen for (_, chosen), _ in kept],
            "rejected": [rejected for _, rejected in kept],
        }
    )
    pq.write_table(table, _FOLDER / "digits-pairs.parquet", compression="zstd")


def _edits(rows: int, *, heldout: bool) -> pa.Table:
    """Return images, each with an edit that copies one digit over the other one, and the number that it results in."""
    texts, images = digit_pairs(2 * rows, seed=11, heldout=heldout)
    kept = [(text, image) for text, image in zip(texts, images, strict=True) if text[0] != text[1]][:rows]
    edits = [(">", text[0] * 2) if number % 2 else ("<", text[1] * 2) for number, (text, _) in enumerate(kept)]
    prompts, numbers = zip(*edits, strict=True)
    return pa.table({"prompt": prompts, "image": [_png(image) for _, image in kept], "number": numbers})


def _png(pixels: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)  # type: ignore[arg-type]
    return file.getvalue()


if __name__ == "__main__":
    main()
