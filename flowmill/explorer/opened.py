"""One sample in the explorer, opened large above the page: the arrow keys go to its neighbors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from flowmill.configs.escaping import in_markdown
from flowmill.explorer.media import OPENED, figures_of, messages, prompt_of, show
from flowmill.explorer.samples import Samples, figures, in_cells, short
from flowmill.tasks.specs.turns import turns_of

_COLUMNS = 6
#: The key of the opened sample, in the session and in the address.
KEY = "sample"


def open_sample(sample: str | None) -> None:
    """Choose the opened sample; None closes it."""
    st.session_state[KEY] = sample


def opened(
    samples: Samples, shown: pd.DataFrame, everything: pd.DataFrame, other: tuple[Samples, pd.DataFrame] | None
) -> None:
    """Show the chosen sample, if there is one.

    Args:
        samples: where the sample is from.
        shown: rows of the page, in its order.
        everything: rows without filters.
        other: samples of the same noise, and their table.
    """
    order = list(shown.sample_id)
    if st.session_state.setdefault(KEY, st.query_params.get(KEY)) not in set(everything.sample_id):
        open_sample(None)
        st.query_params.pop(KEY, None)
        return

    @st.dialog(in_markdown(samples.title), width="large", on_dismiss=lambda: open_sample(None))
    def dialog() -> None:
        sample = st.session_state[KEY]
        st.query_params[KEY] = sample
        _steps(sample, order)
        with messages():
            row = everything.set_index("sample_id", drop=False).loc[sample]
            if other is None:
                _alone(samples, row)
            else:
                _pair(samples, row, *other)
            _chain(samples, row)

    dialog()


def _steps(sample: str, order: list[str]) -> None:
    """Show the buttons to the previous and the next sample, which the arrow keys press."""
    position = order.index(sample) if sample in order else None
    with st.container(horizontal=True, vertical_alignment="center"):
        for label, shortcut, step in (("Previous", "Left", -1), ("Next", "Right", 1)):
            place = -1 if position is None else position + step
            is_there = 0 <= place < len(order)
            st.button(
                label,
                key=f"to {label}",
                shortcut=shortcut,
                disabled=not is_there,
                on_click=open_sample,
                args=(order[place] if is_there else sample,),
            )
        st.caption("not among those shown" if position is None else f"{position + 1} of {len(order)}")


def _alone(samples: Samples, row: Any) -> None:
    left, right = st.columns([OPENED[0], 520])
    with left:
        show(_media(samples, row), prompt_of(row), size=OPENED)
        for number, image in enumerate(_references(samples, row), 1):
            show(image, f"image {number} it starts from")
    with right:
        _facts(samples, row)


def _pair(samples: Samples, row: Any, other: Samples, table: pd.DataFrame) -> None:
    """Show a sample right of that of the same noise."""
    st.caption(prompt_of(row))
    pair = table.set_index("sample_id", drop=False).loc[row.other]
    for column, (source, each) in zip(st.columns(2), ((other, pair), (samples, row)), strict=True):
        with column:
            figured = figures_of(each, [name for name in figures(table) if name in each])
            show(_media(source, each), f"{in_markdown(source.title)}  \n{figured}", size=OPENED)
    for number, image in enumerate(_references(samples, row), 1):
        show(image, f"image {number} both start from")
    _facts(samples, row)


def _media(samples: Samples, row: Any) -> Any:
    return samples.media(pd.DataFrame([row]), sound=True).get(row.sample_id)


def _references(samples: Samples, row: Any) -> Sequence[Any]:
    images = samples.run.references(samples.epoch, [row.sample_id], evaluation=samples.evaluated)
    return images[row.sample_id]


def _facts(samples: Samples, row: Any) -> None:
    """Show figures and origin of a sample, the notes of its rewards, and the updates that used it."""
    facts = {name: short(row[name]) for name in figures(pd.DataFrame([row])) if pd.notna(row[name])}
    facts |= {name: str(row[name]) for name in ("prompt", "replica", "seed", "policy", "group_id", "metadata")}
    _table("value", facts)
    noted = {name.removeprefix("note."): row[name] for name in row.index if name.startswith("note.")}
    notes = {name: note for name, note in noted.items() if isinstance(note, str) and note}
    if notes:
        _table("note", notes)
    if turns_of(samples.run.config) is not None:
        turns = samples.run.turns(samples.epoch, evaluation=samples.evaluated).to_pandas()
        st.markdown("**Its turns**")
        st.dataframe(in_cells(turns[turns.sample_id == row.sample_id].drop(columns="sample_id")), hide_index=True)
    if samples.evaluated:
        return
    with st.spinner("Reading the updates it entered"):
        traced = samples.run.trace(samples.epoch, row.sample_id)["runs"][samples.run.name]
    st.markdown("**Updates it entered**")
    st.dataframe(traced.get("updates", []), hide_index=True)


def _table(title: str, values: Mapping[str, str]) -> None:
    """Show named values. Names of rewards are untrusted text too."""
    st.table(pd.DataFrame({title: {in_markdown(name): in_markdown(value) for name, value in values.items()}}))


def _chain(samples: Samples, row: Any) -> None:
    """Show the stored states of a sample, decoded. A link does not open them, as that loads the base model."""
    if samples.evaluated or (not row.media_format and isinstance(row.get("text"), str)):
        return
    st.markdown("**Its chain**, each stored state decoded")
    if not len(row.states):
        st.info("The rollout stored no latents on the way.")
        return
    if not st.toggle("Decode with the autoencoder of the base model", key="decode"):
        return
    trained = dict(zip(row.steps, row.log_probs, strict=True))
    columns = st.columns(min(_COLUMNS, len(row.states)))
    states = samples.run.decoded(samples.epoch, row.sample_id)
    for number, (step, state) in enumerate(zip(row.states, states, strict=True)):
        caption = f"step {step}, sigma {row.sigmas[step]:.3f}"
        if step in trained:
            caption += f", log_prob {trained[step]:.4f}"
        with columns[number % len(columns)]:
            show(state, caption)
