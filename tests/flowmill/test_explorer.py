"""The page of ``flowmill view``, used as a person would, without a browser; and its server."""

from __future__ import annotations

import html
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

import flowmill
from flowmill.configs.escaping import in_cell, in_markdown, visible
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.explorer.samples import NOISE, in_cells, in_groups, in_reading_order, paired, short, stops
from flowmill.tasks.inputs.store_trust import remember
from tests.conftest import ROOT, FlowmillCommand
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.small import small_data, write_small

pytestmark = pytest.mark.slow

PAGE = str(ROOT / "flowmill" / "explorer" / "page.py")
Make = Callable[..., RunConfig]


#: Prompts as a page must not take them: as pictures from elsewhere, as markup, as commands, as formulas.
PROMPTS = ("![x](http://127.0.0.1:9/t.png) **b** $5$", '=HYPERLINK("http://h")', "a \x1b[31m b", "<b>c</b> :red[d]")


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> flowmill.Run:
    """A run of one epoch, which no test changes."""
    folder = tmp_path_factory.mktemp("explored")
    config = load_config(write_small(folder, small_data(folder, tiny_base)))
    remember(config)
    (folder / "train.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    run_epoch(prepare(config), 1)
    return flowmill.open(str(config.store.root)).run("small")


@pytest.fixture
def page(run: flowmill.Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", [PAGE, run.store.root, "small", ""])
    return AppTest.from_file(PAGE, default_timeout=60).run()


def widget(page: Any, kind: str, label: str) -> Any:
    (found,) = [each for each in getattr(page, kind) if each.label == label]
    return found


def shown(page: Any) -> list[str]:
    """Return the samples of the page in its order."""
    return [button.key.removeprefix("open-") for button in page.button if button.label == "Open"]


def press(page: Any, label: str) -> Any:
    """Press a button of the opened sample; the arrow keys press these buttons too."""
    return page.button(key=f"to {label}").click().run()


def test_samples_are_filtered_and_ordered(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas()
    assert not page.exception
    assert page.subheader[0].value == f"small, rollout of epoch 1: {len(samples)} of {len(samples)} samples"
    assert shown(page) == list(in_groups(samples, "advantage", largest_first=True).sample_id)
    prompt = samples.prompt[0]
    widget(page, "text_input", "Prompt contains").input(prompt).run()
    assert f": {(samples.prompt == prompt).sum()} of" in page.subheader[0].value
    widget(page, "text_input", "Prompt contains").input("a prompt of no sample").run()
    assert "No sample passes" in page.info[0].value
    widget(page, "text_input", "Prompt contains").input("").run()
    reward = widget(page, "select_slider", "reward")
    high = float(samples.reward.max())
    assert reward.value == (float(samples.reward.min()), high)
    low = sorted(samples.reward.astype(float))[len(samples) // 2]
    reward.set_range(low, high).run()
    assert f": {samples.reward.between(low, high).sum()} of" in page.subheader[0].value
    assert set(shown(page)) == set(samples.sample_id[samples.reward >= low])


def test_a_figure_has_one_slider(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas()
    assert samples.reward.equals(samples["reward.jpeg_compressibility"].rename("reward"))
    assert [each.label for each in page.select_slider] == ["reward", "advantage"]


def test_prompts_are_shown_as_text(page: Any, run: flowmill.Run) -> None:
    headings = [html.unescape(each.value) for each in page.markdown]
    assert {each.partition("  \n")[0].strip("*") for each in headings} == {visible(prompt) for prompt in PROMPTS}
    sources = [each.value.partition("  \n")[0].removeprefix("**").removesuffix("**") for each in page.markdown]
    assert not [heading for heading in sources if set("*[<$") & set(heading) or ":red" in heading]
    page.session_state["view"] = "Table"
    page.run()
    assert not page.exception
    # The table can be saved as CSV.
    assert set(page.dataframe[0].value["prompt"]) == {in_cell(prompt) for prompt in PROMPTS}
    shown_texts = in_cells(pd.DataFrame({"text": ["=cmd()"], "note.digits": ["+1"], "reward": [1.0]}))
    assert shown_texts.to_dict("records") == [{"text": "'=cmd()", "note.digits": "'+1", "reward": 1.0}]


def test_a_sample_is_opened_with_its_updates_and_its_chain(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas().set_index("sample_id")
    sample = shown(page)[0]
    before = len(page.get("image"))
    page.button(key=f"open-{sample}").click().run()
    assert not page.exception
    assert len(page.get("image")) == before + 1
    facts = page.table[0].value.value
    assert facts["seed"] == str(samples.seed[sample])
    assert html.unescape(facts["policy"]) == samples.policy[sample]
    assert list(page.dataframe[0].value["epoch"]) == [each["epoch"] for each in updates(run, sample)]
    page.toggle(key="decode").set_value(True).run()
    assert not page.exception
    assert len(page.get("image")) == before + 1 + len(samples.states[sample])


def test_a_chain_that_cannot_be_decoded_is_a_message(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: flowmill.Run, epoch: int, sample: str) -> None:
        raise flowmill.FlowmillError("The base model <b>needs</b> trust.")

    monkeypatch.setattr(flowmill.Run, "decoded", refuse)
    page.button(key=f"open-{shown(page)[0]}").click().run()
    page.toggle(key="decode").set_value(True).run()
    assert not page.exception
    assert page.error[0].value == in_markdown("The base model <b>needs</b> trust.")


def test_the_opened_sample_has_a_previous_and_a_next_one(page: Any, run: flowmill.Run) -> None:
    seeds = run.samples(1).to_pandas().set_index("sample_id").seed
    order = shown(page)
    page.button(key=f"open-{order[0]}").click().run()
    assert page.button(key="to Previous").disabled
    press(page, "Next")
    press(page, "Next")
    assert page.table[0].value.value["seed"] == str(seeds[order[2]])
    press(page, "Previous")
    assert page.table[0].value.value["seed"] == str(seeds[order[1]])
    assert page.query_params["sample"] == order[1]
    shortcuts = [page.button(key=f"to {label}").proto.shortcut for label in ("Previous", "Next")]
    assert shortcuts == ["left", "right"]


def test_a_prompt_heads_its_samples(page: Any, run: flowmill.Run) -> None:
    groups = run.samples(1).to_pandas().set_index("sample_id").group_id[shown(page)].tolist()
    changes = [before != after for before, after in itertools.pairwise(groups)]
    assert sum(changes) + 1 == len(set(groups)) == len(page.markdown)


def test_a_link_reproduces_the_view(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas()
    page.selectbox(key="order").set_value("reward").run()
    page.button(key=f"open-{shown(page)[5]}").click().run()
    assert page.query_params["order"] == "reward"
    values = stops(samples.reward)
    low, high = values[2], values[-1]
    again = AppTest.from_file(PAGE, default_timeout=60)
    again.query_params.update(page.query_params)
    # A browser adds the choices of widgets that are bound to the address.
    bound = {"largest": "false", "prompt": "b", "range of reward": [short(low), short(high)]}
    again.query_params.update(bound)
    again.run()
    assert not again.exception
    found = samples[samples.reward.between(low, high) & samples.prompt.str.contains("b", case=False)]
    assert 0 < len(found) < len(samples)
    assert shown(again) == list(in_groups(found, "reward", largest_first=False).sample_id)
    assert again.table[0].value.equals(page.table[0].value)


def test_a_link_with_values_of_another_store_opens_the_page(run: flowmill.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PAGE, run.store.root, "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60)
    hostile = "../<b>![x](http://127.0.0.1:9/t.png)"
    names = ("run", "samples", "other_run", "other_samples", "order", "sample", "view", "page", "range of reward")
    for name in (*names, "compare", "largest", "decode"):
        page.query_params[name] = hostile
    page.run()
    assert not page.exception
    assert not page.error
    assert len(shown(page)) == run.samples(1).num_rows
    # A link never loads a model.
    assert {"run": "small", "samples": "rollout of epoch 1"}.items() <= page.query_params.items()
    assert "sample" not in page.query_params


def test_two_epochs_are_compared_from_the_same_noise(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepare(make_config())
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    run = flowmill.open(str(context.config.store.root)).run("small")
    monkeypatch.setattr(sys, "argv", [PAGE, run.store.root, "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    assert not page.exception
    assert page.selectbox(key="samples").value == "evaluation of epoch 1"
    assert page.selectbox(key="other_samples").options == ["evaluation of epoch 0"]
    before, after = (run.evaluation(epoch).to_pandas().set_index(NOISE) for epoch in (0, 1))
    assert f"{len(after)} of {len(after)} samples" in page.subheader[0].value
    assert len(page.get("image")) == 2 * len(after)
    page.button(key=f"open-{shown(page)[0]}").click().run()
    opened = after[after.sample_id == shown(page)[0]]
    name = "reward.jpeg_compressibility"
    change = float(opened[name].iloc[0] - before[name][opened.index[0]])
    assert float(page.table[0].value.value[in_markdown(f"change.{name}")]) == pytest.approx(change, rel=1e-3)


def test_samples_without_the_noise_of_others_are_shown_alone(page: Any) -> None:
    assert page.toggle(key="compare").value
    assert not page.error
    assert [each.value for each in page.caption if "has nothing else with the noise of the rollout" in each.value]


def test_the_page_follows_a_run_at_work(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepare(make_config())
    evaluate(context, 0)
    monkeypatch.setattr(sys, "argv", [PAGE, str(context.config.store.root), "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    assert page.selectbox(key="samples").value == "evaluation of epoch 0"
    run_epoch(context, 1)
    evaluate(context, 1)
    # A browser asks for this once the records of the run are more.
    page.run()
    assert page.selectbox(key="samples").options[:3] == [
        "rollout of epoch 1",
        "evaluation of epoch 1",
        "evaluation of epoch 0",
    ]
    assert page.selectbox(key="samples").value == "evaluation of epoch 1", "the newest, as before"
    page.selectbox(key="samples").set_value("evaluation of epoch 0").run()
    run_epoch(context, 2)
    evaluate(context, 2)
    page.run()
    assert page.selectbox(key="samples").value == "evaluation of epoch 0", "what was chosen stays"


def test_a_histogram_counts_every_sample(page: Any, run: flowmill.Run) -> None:
    counts = [re.findall(r"to [^\"]*: (\d+)", each.value) for each in page.sidebar.get("html")]
    assert len(counts) == len(page.select_slider) == 2
    assert {sum(map(int, each)) for each in counts} == {run.samples(1).num_rows}


def test_what_is_chosen_in_one_epoch_breaks_no_other(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("rollout.prompts_per_epoch=8", "rollout.group_size=8")
    context = prepare(config)
    run_epoch(context, 1)
    run_epoch(context, 2)
    monkeypatch.setattr(sys, "argv", [PAGE, str(config.store.root), "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    assert len(shown(page)) == 48
    page.pagination(key="page").set_value(2).run()
    assert len(shown(page)) == 16
    reward = widget(page, "select_slider", "reward")
    reward.set_range(reward.value[0], float(reward.options[len(reward.options) // 2])).run()
    assert not page.exception
    page.selectbox(key="samples").set_value("rollout of epoch 1").run()
    assert "small, rollout of epoch 1: " in page.subheader[0].value
    page.button(key=f"open-{shown(page)[0]}").click().run()
    assert len(page.table) == 1
    page.selectbox(key="samples").set_value("rollout of epoch 2").run()
    assert not page.exception
    assert not page.table
    assert "sample" not in page.query_params


def test_what_cannot_be_shown_is_a_message(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    prepare(config)
    monkeypatch.setattr(sys, "argv", [PAGE, str(config.store.root), "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    assert not page.exception
    assert page.error[0].value == "Nothing of run 'small' is rolled out yet."


def test_a_run_that_is_not_there(flowmill: FlowmillCommand, run: Any) -> None:
    done = flowmill("view", "smal", "--root", run.store.root)
    assert done.returncode == 1
    assert "Did you mean 'small'" in done.stderr


def updates(run: flowmill.Run, sample: str) -> list[dict[str, Any]]:
    return run.trace(1, sample)["runs"]["small"]["updates"]  # type: ignore[no-any-return]


def test_the_table_begins_with_what_a_sample_earned() -> None:
    columns = ["sample_id", "seed", "prompt", "reward.digits", "advantage", "reward"]
    assert in_reading_order(columns) == ["reward", "advantage", "prompt", "reward.digits", "sample_id", "seed"]


def test_a_slider_ends_at_the_smallest_and_the_largest_value() -> None:
    values = pd.Series(np.float32([0.96841, 0.96842, 0.1, np.nan, 0.1]))
    assert stops(values) == [float(np.float32(0.1)), float(np.float32(0.96842))]
    many = pd.Series(np.linspace(-1, 1 / 3, 1000))
    assert len(stops(many)) == 101
    assert (stops(many)[0], stops(many)[-1]) == (-1, 1 / 3)
    assert stops(pd.Series([np.nan])) == []


def test_samples_of_a_prompt_stay_together() -> None:
    samples = pd.DataFrame(
        {"sample_id": [*"abcd"], "group_id": [*"xyxy"], "prompt": [*"qpqp"], "reward": [1.0, 0.8, 0.0, 0.4]}
    )
    assert list(in_groups(samples, "reward", largest_first=True).sample_id) == ["b", "d", "a", "c"]
    assert list(in_groups(samples, "reward", largest_first=False).sample_id) == ["c", "a", "d", "b"]
    assert list(in_groups(samples, "prompt", largest_first=False).sample_id) == ["b", "d", "a", "c"]


def test_pairs_have_the_same_prompt_replica_and_seed() -> None:
    after = pd.DataFrame(
        {
            "sample_id": ["a", "b", "c"],
            "prompt_id": [*"ppq"],
            "replica": [0, 1, 0],
            "seed": [5, 6, 7],
            "reward.r": [1.0, 0.5, 0.25],
        }
    )
    before = pd.DataFrame(
        {
            "sample_id": ["x", "y", "z"],
            "prompt_id": [*"ppq"],
            "replica": [0, 1, 0],
            "seed": [5, 6, 8],
            "reward.r": [0.25, 1.0, 0.0],
        }
    )
    pairs = paired(after, before)
    assert list(pairs.sample_id) == ["a", "b"]
    assert list(pairs.other) == ["x", "y"]
    assert list(pairs["change.reward.r"]) == [0.75, -0.5]
