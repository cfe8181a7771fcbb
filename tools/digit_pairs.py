"""Writes configs/prompts/digits-pairs.parquet: two handwritten digits per image, right ones and ones of other numbers.

python -m tools.digit_pairs
"""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from models.quickstart.corpus import digit_pairs

_FOLDER = Path(__file__).parents[1] / "configs" / "prompts"
_ROWS = 300


def main() -> None:
    """Write the table; none of its prompts is held out."""
    heldout = set((_FOLDER / "digits-heldout.txt").read_text().split())
    texts, images = digit_pairs(1000, seed=7)
    rows = {}
    for number, text in enumerate(texts):
        other = (number * 7 + 13) % len(texts)
        if f'"{text}"' not in heldout and texts[other] != text:
            rows.setdefault((f'"{text}"', _png(images[number])), _png(images[other]))
    kept = list(rows.items())[:_ROWS]
    table = pa.table(
        {
            "prompt": [prompt for (prompt, _), _ in kept],
            "chosen": [chosen for (_, chosen), _ in kept],
            "rejected": [rejected for _, rejected in kept],
        }
    )
    pq.write_table(table, _FOLDER / "digits-pairs.parquet", compression="zstd")


def _png(pixels: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)  # type: ignore[arg-type]
    return file.getvalue()


if __name__ == "__main__":
    main()
