"""The page of ``flowmill view``, which browses a run's trajectories. Streamlit reruns it for every click."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from PIL import Image

import flowmill
from configs.escaping import in_cell, in_markdown, visible

_VIEWS = ("Samples", "Group", "Sample", "Table")
_COLUMNS = 6
#: Small images are enlarged by an integer factor up to about this width in pixels.
_WIDTH = 240


def main(root: str, run_name: str | None, *, trust_store: bool) -> None:
    """Show the page.

    Args:
        root: the store.
        run_name: the run that is shown first.
        trust_store: see ``Store.run``.
    """
    st.set_page_config(page_title="flowmill", layout="wide")
    st.html("<style>.stMainBlockContainer {padding-top: 3rem}</style>")
    st.session_state.setdefault("view", _VIEWS[0])
    try:
        run, epoch = _choose(root, run_name, trust_store=trust_store)
        everything = _samples(root, run.name, epoch, trust_store=trust_store)
        shown = _filtered(everything)
        st.subheader(in_markdown(f"{run.name}, epoch {epoch}: {len(shown)} of {len(everything)} samples"))
        view = st.segmented_control("View", _VIEWS, key="view", label_visibility="collapsed")
        if shown.empty:
            st.info("No sample passes the filters on the left.")
        elif view == "Group":
            _group(run, epoch, everything, shown)
        elif view == "Sample":
            _sample(run, epoch, everything, shown)
        elif view == "Table":
            st.dataframe(_as_cells(shown), hide_index=True)
        else:
            _gallery(run, epoch, shown)
    except flowmill.FlowmillError as error:
        st.error("  \n".join(map(in_markdown, str(error).splitlines())))


@st.cache_resource
def _run(root: str, name: str, *, trust_store: bool) -> flowmill.Run:
    return flowmill.open(root).run(name, trust_store=trust_store)


@st.cache_data(max_entries=8, show_spinner=False)
def _samples(root: str, name: str, epoch: int, *, trust_store: bool) -> pd.DataFrame:
    table = _run(root, name, trust_store=trust_store).samples(epoch).to_pandas()
    return table.astype({"prompt": str})


def _choose(root: str, first: str | None, *, trust_store: bool) -> tuple[flowmill.Run, int]:
    """Return the run and epoch chosen in the sidebar."""
    st.sidebar.title("flowmill")
    st.sidebar.caption(in_markdown(root.rpartition("/")[2]), help=in_markdown(root))
    names = flowmill.open(root).runs
    if not names:
        raise flowmill.FlowmillError("The store holds no runs yet; start one with 'flowmill run'.")
    name = st.sidebar.selectbox("Run", names, index=names.index(first) if first in names else 0, key="run")
    run = _run(root, name, trust_store=trust_store)
    if st.sidebar.button("Reload", help="Reads artifacts made meanwhile."):
        run.refresh()
        st.cache_data.clear()
    epochs = run.rollouts
    if not epochs:
        raise flowmill.FlowmillError(f"Nothing of run '{name}' is rolled out yet.")
    epoch = st.sidebar.selectbox("Epoch", epochs[::-1], key="epoch")
    return run, int(epoch)


def _filtered(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples that pass the filters of the sidebar, in the order chosen there."""
    text = st.sidebar.text_input("Prompt contains", key="prompt")
    found = samples[samples.prompt.str.contains(text, case=False, regex=False)] if text else samples
    numbers = _numbers(samples.columns)
    for name in numbers:
        low, high = float(samples[name].min()), float(samples[name].max())
        if low < high:
            chosen = st.sidebar.slider(in_markdown(name), low, high, (low, high), key=f"range of {name}")
            # Samples without a value pass until a range of values is chosen.
            found = found[found[name].between(*chosen) | (found[name].isna() & (chosen == (low, high)))]
    first = [name for name in ("advantage",) if name in numbers]
    order = st.sidebar.selectbox(
        "Order by", list(dict.fromkeys([*first, *numbers, "prompt", "sample_id"])), key="order"
    )
    best_first = st.sidebar.toggle("Largest first", value=True, key="largest")
    return found.sort_values([order, "sample_id"], ascending=[not best_first, True])


def _numbers(columns: Iterable[str]) -> list[str]:
    """Return the columns of rewards: the optimized sum and its advantage, then single rewards."""
    known = list(columns)
    whole = [name for name in ("reward", "advantage") if name in known]
    return [*whole, *(name for name in known if name.startswith("reward."))]


def _as_cells(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the table as the page shows it, which can be saved as CSV there."""
    shown = samples[_in_order(samples.columns)]
    return shown.assign(**{name: shown[name].map(in_cell) for name in ("prompt", "metadata")})


def _in_order(columns: Iterable[str]) -> list[str]:
    """Return columns in reading order: rewards, prompt and text, then all others."""
    known = list(columns)
    first = [name for name in ("reward", "advantage", "prompt", "text") if name in known]
    return list(dict.fromkeys([*first, *_numbers(known), *known]))


def _gallery(run: flowmill.Run, epoch: int, shown: pd.DataFrame) -> None:
    per_page = 4 * _COLUMNS
    pages = -(-len(shown) // per_page)
    page = st.number_input(f"Page, of {pages}", 1, pages, key="page") if pages > 1 else 1
    _grid(run, epoch, shown.iloc[(page - 1) * per_page : page * per_page])


def _group(run: flowmill.Run, epoch: int, everything: pd.DataFrame, shown: pd.DataFrame) -> None:
    """Show the samples that were compared with each other."""
    groups = shown.drop_duplicates("group_id").set_index("group_id").prompt
    group = st.selectbox(
        "Group", groups.index, format_func=lambda name: visible(f"{groups[name]}  ({name})"), key="group"
    )
    members = everything[everything.group_id == group]
    if "advantage" in members:
        members = members.sort_values("advantage", ascending=False)
        st.bar_chart(members, x="replica", y=["reward", "advantage"], stack=False, height=300)
    _grid(run, epoch, members)


def _sample(run: flowmill.Run, epoch: int, everything: pd.DataFrame, shown: pd.DataFrame) -> None:
    """Show one sample: identity, rewards, the updates it entered, and its chain."""
    sample = st.selectbox("Sample", [*dict.fromkeys([*shown.sample_id, *everything.sample_id])], key="sample")
    row = everything.set_index("sample_id").loc[sample]
    left, right = st.columns([1, 3])
    with left:
        made = run.images(epoch, [sample])[sample] if row.media_format else row.get("text")
        films = run.films(epoch, [sample]) if row.media_format == "mp4" else {}
        _show(films.get(sample, made), _caption(row), width=2 * _WIDTH)
        for number, image in enumerate(run.references(epoch, [sample])[sample], 1):
            _show(image, f"image {number} it starts from")
    with right:
        found = run.trace(epoch, sample)["runs"][run.name]
        facts = {name: row[name] for name in ("prompt", "replica", "seed", "policy", "group_id", "metadata")}
        facts |= {name: row[name] for name in _numbers(row.index)}
        for name, about in found.get("rewards", {}).items():
            facts[f"reward.{name}"] = f"{facts[f'reward.{name}']}  {about['note']}"
        # Names of rewards are untrusted text too.
        st.table(pd.DataFrame({"value": {in_markdown(name): in_markdown(str(value)) for name, value in facts.items()}}))
        st.markdown("**Updates it entered**")
        st.dataframe(found.get("updates", []), hide_index=True)
    if not isinstance(row.get("text"), str):
        _chain(run, epoch, sample, row)


def _chain(run: flowmill.Run, epoch: int, sample: str, row: Any) -> None:
    st.markdown("**Its chain**, each stored state decoded")
    if not len(row.states):
        st.info("The rollout stored no latents on the way.")
        return
    if not st.toggle("Decode with the autoencoder of the base model", key="decode"):
        return
    trained = dict(zip(row.steps, row.log_probs, strict=True))
    columns = st.columns(min(_COLUMNS, len(row.states)))
    for number, (step, state) in enumerate(zip(row.states, run.decoded(epoch, sample), strict=True)):
        about = f"step {step}, sigma {row.sigmas[step]:.3f}"
        if step in trained:
            about += f", log_prob {trained[step]:.4f}"
        with columns[number % len(columns)]:
            _show(state, about)


def _grid(run: flowmill.Run, epoch: int, rows: pd.DataFrame) -> None:
    images = run.images(epoch, set(rows[rows.media_format != ""].sample_id))
    columns = st.columns(_COLUMNS)
    for number, row in enumerate(rows.to_dict("records")):
        with columns[number % _COLUMNS]:
            earned = [f"{name} {row[name]:.3f}" for name in ("reward", "advantage") if pd.notna(row.get(name))]
            made = images.get(row["sample_id"], row.get("text"))
            _show(made, f"{_caption(row)}  \n{', '.join(earned)}")
            st.button("Open", key=f"open {row['sample_id']}", on_click=_open, args=(row["sample_id"], row["group_id"]))


def _caption(row: Any) -> str:
    """Return the prompt of a sample, with the rewritten prompt if it was rendered from one."""
    written = row.get("text") if row["media_format"] else None
    prompt = in_markdown(row["prompt"])
    return f"{prompt}  \n→ {in_markdown(written)}" if isinstance(written, str) else prompt


def _open(sample: str, group: str) -> None:
    st.session_state["view"] = "Sample"
    st.session_state["sample"] = sample
    st.session_state["group"] = group


def _show(
    media: Image.Image | Sequence[Image.Image] | bytes | str | None, caption: str, *, width: int = _WIDTH
) -> None:
    """Show an image, a clip, a clip with sound, or a text below its prompt."""
    if media is None:
        st.caption(f"no image stored: {caption}")
    elif isinstance(media, str):
        st.caption(caption)
        st.code(visible(media, keep="\n\t"), language=None, wrap_lines=True)
    elif isinstance(media, bytes):
        st.video(media)
        st.caption(caption)
    elif isinstance(media, Image.Image):
        st.image(_enlarged(media, width), caption=caption)
    else:
        frames, data = [_enlarged(frame, width) for frame in media], io.BytesIO()
        frames[0].save(data, "WEBP", save_all=True, append_images=frames[1:], duration=125, loop=0)
        st.image(data.getvalue(), caption=caption)


def _enlarged(image: Image.Image, width: int) -> Image.Image:
    times = width // image.width
    return image if times < 2 else image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


if __name__ == "__main__":
    given_root, given_run, given_trust = sys.argv[1:]
    main(given_root, given_run or None, trust_store=given_trust == "trust")
