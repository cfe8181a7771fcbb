"""Images, clips and texts of samples as elements of the explorer's page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import streamlit as st
from PIL.Image import Image, Resampling

from flowmill.configs.errors import FlowmillError
from flowmill.configs.escaping import in_markdown, visible
from flowmill.explorer.samples import short

#: Width of a card of the gallery in pixels, and the largest size of an opened sample.
CARD = 156
OPENED = (600, 560)
#: Characters of a text on a card; the opened sample has all of them.
_EXCERPT = 600

Media = Image | Sequence[Image] | bytes | str | None


@contextmanager
def messages() -> Iterator[None]:
    """Show an error of flowmill inside as a message."""
    try:
        yield
    except FlowmillError as error:
        st.error("  \n".join(map(in_markdown, str(error).splitlines())))


def show(media: Media, caption: str, *, size: tuple[int, int] = (CARD, 4 * CARD)) -> None:
    """Show an image, a clip, a clip with sound, or a text.

    Args:
        media: the sample; a list is the frames of a clip.
        caption: Markdown below it.
        size: width and height in pixels that it fills as far as its shape permits.
    """
    if media is None:
        st.caption(f"no image stored: {caption}")
    elif isinstance(media, str):
        st.code(visible(media, keep="\n\t"), language=None, wrap_lines=True)
        st.caption(caption)
    elif isinstance(media, bytes):
        st.video(media)
        st.caption(caption)
    else:
        frames = [media] if isinstance(media, Image) else media
        factor = min(size[0] / frames[0].width, size[1] / frames[0].height)
        width = max(1, int(frames[0].width * factor))
        fitted, data = [_fitted(frame, factor) for frame in frames], io.BytesIO()
        if len(fitted) > 1:
            fitted[0].save(data, "WEBP", save_all=True, append_images=fitted[1:], duration=125, loop=0)
        st.image(data.getvalue() or fitted[0], caption=caption or None, width=width, output_format="PNG")


def _fitted(image: Image, factor: float) -> Image:
    """Return a small image enlarged with sharp pixels, or a large one with at most two pixels per pixel of the page."""
    if factor > 1:
        times = -int(-factor // 1)
        return image.resize((image.width * times, image.height * times), Resampling.NEAREST)
    small = image.copy()
    small.thumbnail((max(1, int(2 * factor * image.width)), max(1, int(2 * factor * image.height))))
    return small


def excerpt(media: Media) -> Media:
    """Return media for a card: the beginning of a long text."""
    return f"{media[:_EXCERPT]}…" if isinstance(media, str) and len(media) > _EXCERPT else media


def prompt_of(row: Mapping[str, Any]) -> str:
    """Return the prompt of a sample in Markdown, with the rewritten prompt if it was rendered from one."""
    written = row.get("text") if row["media_format"] else None
    prompt = in_markdown(row["prompt"])
    return f"{prompt}  \n→ {in_markdown(written)}" if isinstance(written, str) else prompt


def figures_of(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return figures of a sample in one line of Markdown; a changed one with its value in the other sample."""
    lines, digits = [], 3
    for name in names:
        if pd.notna(row.get(name)) and not name.startswith("change."):
            change = row.get(f"change.{name}")
            before = "" if change is None or pd.isna(change) else f"{short(row[name] - change, digits)} → "
            lines.append(f"{in_markdown(name.removeprefix('reward.'))} {before}{short(row[name], digits)}")
    return ", ".join(lines)
