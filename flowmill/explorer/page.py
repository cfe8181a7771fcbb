"""The page of ``flowmill view``, which browses a run's samples. Streamlit reruns it for every click.

The page's address reproduces the view: widgets keep their choices in its query parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st

import flowmill
from flowmill.configs.escaping import in_markdown
from flowmill.explorer.gallery import gallery
from flowmill.explorer.media import messages
from flowmill.explorer.opened import opened
from flowmill.explorer.samples import (
    Samples,
    comparable,
    figures,
    first_shown,
    in_cells,
    in_groups,
    in_reading_order,
    labels,
    paired,
    short,
    stops,
)
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore

#: Seconds between looks at the records of a run that may be at work, and bars of a histogram.
_INTERVAL_S, _BINS = 5, 24
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
        _follow(root, samples.run.name, labels(samples.run), trust_store=trust_store)
        everything = _table(root, samples, trust_store=trust_store)
        pair = None
        if other is not None:
            pair = other, _table(root, other, trust_store=trust_store)
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
            st.dataframe(in_cells(shown[in_reading_order(list(shown.columns))]), hide_index=True)
        else:
            gallery(samples, shown, pair)
        opened(samples, shown, everything, pair)


def _data(run: flowmill.Run) -> None:
    """Show the tables of a run's data."""
    tables = run.data()
    for title, rows in tables.items():
        st.markdown(f"**{in_markdown(title)}**")
        st.dataframe(in_cells(pd.DataFrame(rows)), hide_index=True)
    if not tables:
        st.info("The run has no given samples, no answers of raters and no fitted reward.")


def _records(root: str, name: str) -> int:
    """Return the number of artifacts that a run has recorded; what is read of it is cached with this number."""
    return len(ArtifactStore(root).root.list(layout.lineage(name)))


@st.cache_resource(max_entries=8)
def _opened_run(root: str, name: str, records: int, *, trust_store: bool) -> flowmill.Run:
    return flowmill.open(root).run(name, trust_store=trust_store)


def _run(root: str, name: str, *, trust_store: bool) -> flowmill.Run:
    return _opened_run(root, name, _records(root, name), trust_store=trust_store)


@st.cache_data(max_entries=8, show_spinner=False)
def _read_table(root: str, name: str, label: str, records: int, *, trust_store: bool) -> pd.DataFrame:
    return Samples(_run(root, name, trust_store=trust_store), label).table()


def _table(root: str, samples: Samples, *, trust_store: bool) -> pd.DataFrame:
    name = samples.run.name
    return _read_table(root, name, samples.label, _records(root, name), trust_store=trust_store)


def _follow(root: str, name: str, shown: Sequence[str], *, trust_store: bool) -> None:
    """Run the page again once a run at work has samples that the page does not list."""
    seen = [_records(root, name)]

    @st.fragment(run_every=_INTERVAL_S)
    def look() -> None:
        records = _records(root, name)
        if records != seen[0]:
            seen[0] = records
            if labels(flowmill.open(root).run(name, trust_store=trust_store)) != shown:
                st.rerun()

    look()


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
    options = labels(run)
    if not options:
        raise flowmill.FlowmillError(f"Nothing of run '{run.name}' is rolled out yet.")
    newest = first_shown(options)
    # Who looks at the last evaluation of a run at work sees each new one.
    if "newest" in st.session_state and st.session_state.get("samples") == st.session_state["newest"]:
        st.session_state["samples"] = newest
    st.session_state["newest"] = newest
    samples = Samples(run, _one_of("Samples", options, newest, "samples"))
    if not st.sidebar.toggle(
        "Compare with the same noise",
        value=True,
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
        st.sidebar.caption(
            in_markdown(
                f"Run '{other.name}' has nothing else with the noise of the {samples.label}. Evaluations of all epochs "
                "have the same noise, and rollouts of one epoch of two runs with one seed."
            )
        )
        return samples, None
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
            _histogram(samples[name], low, high)
            # Samples without a value pass until a range of values is chosen.
            selected = selected[selected[name].between(low, high) | (selected[name].isna() & ((low, high) == ends))]
    first = [name for name in columns if name.startswith("change.") or name == "advantage"]
    orders = list(dict.fromkeys([*first, *columns, "prompt", "sample_id"]))
    order = _one_of("Order by", orders, orders[0], "order")
    largest_first = st.sidebar.toggle("Largest first", value=True, key="largest", bind="query-params")
    return in_groups(selected, order, largest_first=largest_first)


def _histogram(values: pd.Series[float], low: float, high: float) -> None:
    """Show how many samples have which values, with those between two values highlighted."""
    counts, edges = np.histogram(values.dropna().astype(float), bins=_BINS)
    bars = [
        f'<div title="{short(start)} to {short(end)}: {count}" style="flex: 1; '
        f"height: {100 * count / counts.max():.1f}%; "
        f'background: {"#0068c9" if start <= high and end >= low else "#8886"}"></div>'
        for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True)
    ]
    style = "display: flex; align-items: flex-end; gap: 1px; height: 2.5rem; margin: -0.75rem 0.5rem 0"
    st.sidebar.html(f'<div style="{style}">{"".join(bars)}</div>')


if __name__ == "__main__":
    given_root, given_run, given_trust = sys.argv[1:]
    main(given_root, given_run or None, trust_store=given_trust == "trust")
