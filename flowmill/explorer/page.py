"""The page of ``flowmill view``, which browses a run's samples. Streamlit reruns it for every click.

The page's address reproduces the view: widgets keep their choices in its query parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

import flowmill
from flowmill.configs.escaping import in_cell, in_markdown
from flowmill.explorer.gallery import gallery
from flowmill.explorer.media import messages
from flowmill.explorer.opened import opened
from flowmill.explorer.samples import (
    Samples,
    comparable,
    figures,
    in_groups,
    in_reading_order,
    labels,
    paired,
    short,
    stops,
)

if TYPE_CHECKING:
    import pandas as pd

#: A card's button is invisible and covers the card, so that a click on the image opens it.
_STYLE = """<style>
.stMainBlockContainer {padding-top: 3rem}
[class*="st-key-card-"] {position: relative; border-radius: 0.5rem}
[class*="st-key-card-"] [class*="st-key-open-"] {position: absolute; inset: 0; z-index: 2; width: 100%; height: 100%}
[class*="st-key-open-"] :is(.stButton, .stTooltipIcon, button) {width: 100%; height: 100%}
[class*="st-key-open-"] button {opacity: 0; cursor: zoom-in}
[class*="st-key-card-"]:is(:hover, :focus-within) {outline: 2px solid #888; outline-offset: 4px}
</style>"""


def main(root: str, run_name: str | None, *, trust_store: bool) -> None:
    """Show the page.

    Args:
        root: the store.
        run_name: the run that is shown first.
        trust_store: see ``Store.run``.
    """
    st.set_page_config(page_title="flowmill", layout="wide")
    st.html(_STYLE)
    with messages():
        samples, other = _choose(root, run_name, trust_store=trust_store)
        everything = _table(root, samples.run.name, samples.label, trust_store=trust_store)
        pair = None
        if other is not None:
            pair = other, _table(root, other.run.name, other.label, trust_store=trust_store)
            everything = paired(everything, pair[1])
        shown = _filtered(everything)
        title = samples.title
        if other is not None:
            title = f"{other.title} → {samples.label if other.run.name == samples.run.name else title}"
        st.subheader(in_markdown(f"{title}: {len(shown)} of {len(everything)} samples"))
        view = st.segmented_control(
            "View",
            ("Samples", "Table", "Data"),
            default="Samples",
            required=True,
            key="view",
            bind="query-params",
            label_visibility="collapsed",
        )
        if view == "Data":
            _data(samples.run)
        elif everything.empty:
            st.info("No sample of one has the noise of a sample of the other: prompt, replica and seed.")
        elif shown.empty:
            st.info("No sample passes the filters on the left.")
        elif view == "Table":
            st.dataframe(_as_cells(shown), hide_index=True)
        else:
            gallery(samples, shown, pair)
        opened(samples, shown, everything, pair)


def _data(run: flowmill.Run) -> None:
    """Show the tables of a run's data."""
    tables = run.data()
    for title, rows in tables.items():
        st.markdown(f"**{in_markdown(title)}**")
        st.dataframe([{name: in_cell(value) for name, value in row.items()} for row in rows], hide_index=True)
    if not tables:
        st.info("The run has no given samples, no answers of raters and no fitted reward.")


@st.cache_resource
def _run(root: str, name: str, *, trust_store: bool) -> flowmill.Run:
    return flowmill.open(root).run(name, trust_store=trust_store)


@st.cache_data(max_entries=8, show_spinner=False)
def _table(root: str, name: str, label: str, *, trust_store: bool) -> pd.DataFrame:
    return Samples(_run(root, name, trust_store=trust_store), label).table()


def _reload() -> None:
    st.cache_resource.clear()
    st.cache_data.clear()


def _one_of(label: str, options: Sequence[str], first: str, key: str) -> str:
    """Return the choice in a list of the sidebar, which the address always names; ``first`` until there is one."""
    if st.session_state.get(key) not in options:
        linked = st.query_params.get(key)
        st.session_state[key] = linked if linked in options else first
    # Widgets that are bound to the address leave out a default, which may be another one tomorrow.
    chosen: str = st.sidebar.selectbox(label, options, key=key)
    st.query_params[key] = chosen
    return chosen


def _choose(root: str, first: str | None, *, trust_store: bool) -> tuple[Samples, Samples | None]:
    """Return the samples chosen in the sidebar, and those they are compared with."""
    st.sidebar.title("flowmill")
    st.sidebar.caption(in_markdown(root.rpartition("/")[2]), help=in_markdown(root))
    names = flowmill.open(root).runs
    if not names:
        raise flowmill.FlowmillError("The store holds no runs yet; start one with 'flowmill run'.")
    run = _run(root, _one_of("Run", names, first if first in names else names[0], "run"), trust_store=trust_store)
    st.sidebar.button("Reload", help="Reads artifacts made meanwhile.", on_click=_reload)
    options = labels(run)
    if not options:
        raise flowmill.FlowmillError(f"Nothing of run '{run.name}' is rolled out yet.")
    samples = Samples(run, _one_of("Samples", options, options[0], "samples"))
    if not st.sidebar.toggle(
        "Compare with the same noise",
        key="compare",
        bind="query-params",
        help="Shows samples of another epoch or run left of those with the same prompt, replica and seed.",
    ):
        return samples, None
    other = _run(root, _one_of("Compare with run", names, run.name, "other_run"), trust_store=trust_store)
    fitting = [
        each for each in comparable(labels(other), samples.label) if (other.name, each) != (run.name, samples.label)
    ]
    if not fitting:
        raise flowmill.FlowmillError(
            f"Run '{other.name}' has nothing with the noise of the {samples.label}. Evaluations of all epochs have the "
            "same noise, and rollouts of one epoch of two runs with one seed."
        )
    return samples, Samples(other, _one_of("Compare with samples", fitting, fitting[0], "other_samples"))


def _filtered(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples that pass the filters of the sidebar, in the order chosen there."""
    text = st.sidebar.text_input("Prompt contains", key="prompt", bind="query-params")
    selected = samples[samples.prompt.str.contains(text, case=False, regex=False)] if text else samples
    columns = figures(samples)
    for name in columns:
        values = stops(samples[name])
        if len(values) > 1:
            ends = values[0], values[-1]
            low, high = st.sidebar.select_slider(
                in_markdown(name), values, ends, format_func=short, key=f"range of {name}", bind="query-params"
            )
            # Samples without a value pass until a range of values is chosen.
            selected = selected[selected[name].between(low, high) | (selected[name].isna() & ((low, high) == ends))]
    first = [name for name in columns if name.startswith("change.") or name == "advantage"]
    orders = list(dict.fromkeys([*first, *columns, "prompt", "sample_id"]))
    order = _one_of("Order by", orders, orders[0], "order")
    largest_first = st.sidebar.toggle("Largest first", value=True, key="largest", bind="query-params")
    return in_groups(selected, order, largest_first=largest_first)


def _as_cells(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the table as the page shows it, which can be saved as CSV there."""
    shown = samples[in_reading_order(list(samples.columns))]
    return shown.assign(**{name: shown[name].map(in_cell) for name in ("prompt", "metadata")})


if __name__ == "__main__":
    given_root, given_run, given_trust = sys.argv[1:]
    main(given_root, given_run or None, trust_store=given_trust == "trust")
