"""A page of samples in the explorer, below their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from flowmill.configs.escaping import in_markdown
from flowmill.explorer.media import CARD, excerpt, figures_of, prompt_of, show
from flowmill.explorer.opened import open_sample
from flowmill.explorer.samples import Samples, figures

if TYPE_CHECKING:
    import pandas as pd

_PER_PAGE = 48
#: Space between cards in pixels.
_GAP = 16
#: Width of a card with a text, and most width of a group that shares its row, in pixels.
_TEXT, _HALF = 230, 560
_SCROLL = "<script>/* page {} */ document.querySelector('[data-testid=\"stMain\"]').scrollTo(0, 0)</script>"


def gallery(samples: Samples, shown: pd.DataFrame, other: tuple[Samples, pd.DataFrame] | None) -> None:
    """Show a page of samples below their prompts; each opens with a click."""
    pages = -(-len(shown) // _PER_PAGE)
    place = st.container()
    page = st.pagination(pages, key="page", bind="query-params") if pages > 1 else 1
    # A page begins at its top.
    place.html(_SCROLL.format(page), unsafe_allow_javascript=True)
    rows = shown.iloc[(page - 1) * _PER_PAGE : page * _PER_PAGE]
    sides = [("sample_id", samples.media(rows))]
    if other is not None:
        table = other[1].set_index("sample_id", drop=False).loc[rows.other]
        sides.insert(0, ("other", other[0].media(table)))
    size = int(shown.groupby("group_id").size().max())
    width = (CARD if rows.media_format.all() else _TEXT) * len(sides) + _GAP // 2 * (len(sides) + 1)
    # Small groups share a row.
    is_small = size * width <= _HALF
    with place.container(horizontal=is_small):
        if size == 1:
            _cards(rows, sides, width, named=True)
        else:
            for group, members in rows.groupby("group_id", sort=False):
                with st.container(width=size * width if is_small else "stretch"):
                    _heading(shown[shown.group_id == group])
                    _cards(members, sides, width, named=False)


def _heading(group: pd.DataFrame) -> None:
    """Show the prompt of a group, with the means of its figures."""
    names = [name for name in figures(group) if name != "advantage"]
    mean = figures_of(group[names].mean().to_dict(), names)
    text = f"mean of {len(group)}: {mean}" if mean else f"{len(group)} samples"
    st.markdown(f"**{in_markdown(group.prompt.iloc[0])}**  \n{text}")


def _cards(rows: pd.DataFrame, sides: Sequence[tuple[str, Mapping[str, Any]]], width: int, *, named: bool) -> None:
    """Show samples in a flow, each with its media and figures, and its prompt if no heading names it."""
    with st.container(horizontal=True, gap="small"):
        for row in rows.to_dict("records"):
            sample = row["sample_id"]
            with st.container(key=f"card-{sample}", width=width - _GAP):
                with st.container(horizontal=True, gap="xsmall"):
                    for column, media in sides:
                        show(excerpt(media.get(row[column])), "")
                lines = [prompt_of(row)] if named or (row["media_format"] and row.get("text")) else []
                st.caption("  \n".join([*lines, figures_of(row, figures(rows))]))
                st.button("Open", key=f"open-{sample}", on_click=open_sample, args=(sample,))
