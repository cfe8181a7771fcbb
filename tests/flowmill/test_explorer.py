"""The page of ``flowmill view``, used as a person would, without a browser; and its server."""

from __future__ import annotations

import html
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from streamlit.testing.v1 import AppTest

import flowmill
from configs.escaping import in_cell, visible
from configs.schema import RunConfig
from tests.conftest import ROOT, FlowmillCommand
from tests.support.inside import prepare, run_epoch

pytestmark = pytest.mark.slow

PAGE = str(ROOT / "flowmill" / "explorer.py")
Make = Callable[..., RunConfig]


#: Prompts as a page must not take them: as pictures from elsewhere, as markup, as commands, as formulas.
PROMPTS = ("![x](http://127.0.0.1:9/t.png) **b** $5$", '=HYPERLINK("http://h")', "a \x1b[31m b", "<b>c</b> :red[d]")


@pytest.fixture
def run(make_config: Make, tmp_path: Path) -> flowmill.Run:
    config = make_config()
    (tmp_path / "train.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    run_epoch(prepare(config), 1)
    return flowmill.open(str(config.store.root)).run("small")


@pytest.fixture
def page(run: flowmill.Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", [PAGE, run.store.root, "small", ""])
    return AppTest.from_file(PAGE, default_timeout=60).run()


def widget(page: Any, kind: str, label: str) -> Any:
    (found,) = [each for each in getattr(page, kind) if each.label == label]
    return found


def test_samples_are_filtered_and_ordered(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas()
    assert not page.exception
    assert page.subheader[0].value == f"small, epoch 1: {len(samples)} of {len(samples)} samples"
    best = samples.sort_values(["advantage", "sample_id"], ascending=[False, True]).iloc[0]
    first_open = next(button for button in page.button if button.label == "Open")
    assert first_open.key == f"open {best.sample_id}"
    prompt = samples.prompt[0]
    widget(page, "text_input", "Prompt contains").input(prompt).run()
    assert f": {(samples.prompt == prompt).sum()} of" in page.subheader[0].value
    widget(page, "text_input", "Prompt contains").input("nobody's prompt").run()
    assert "No sample passes" in page.info[0].value
    widget(page, "text_input", "Prompt contains").input("").run()
    low, high = float(samples.reward.median()), float(samples.reward.max())
    widget(page, "slider", "reward").set_range(low, high).run()
    assert f": {samples.reward.between(low, high).sum()} of" in page.subheader[0].value


def test_prompts_are_shown_as_text(page: Any, run: flowmill.Run) -> None:
    captions = {
        html.unescape(image.caption).rpartition("  \n")[0] for each in page.get("image") for image in each.proto.imgs
    }
    assert captions == {visible(prompt) for prompt in PROMPTS}
    sources = [image.caption for each in page.get("image") for image in each.proto.imgs]
    assert not [caption for caption in sources if set("*[<$") & set(caption) or ":red" in caption]
    page.session_state["view"] = "Table"
    page.run()
    assert not page.exception
    # The table can be saved as CSV.
    assert set(page.dataframe[0].value["prompt"]) == {in_cell(prompt) for prompt in PROMPTS}


def test_a_sample_is_opened_with_its_updates_and_its_chain(page: Any, run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas().set_index("sample_id")
    button = next(button for button in page.button if button.label == "Open")
    sample = button.key.removeprefix("open ")
    button.click().run()
    assert not page.exception
    assert widget(page, "selectbox", "Sample").value == sample
    facts = page.table[0].value.value
    assert facts["seed"] == str(samples.seed[sample])
    assert html.unescape(facts["policy"]) == samples.policy[sample]
    assert list(page.dataframe[0].value["epoch"]) == [each["epoch"] for each in updates(run, sample)]
    before = len(page.image)
    page.toggle(key="decode").set_value(True).run()
    assert not page.exception
    assert len(page.image) == before + len(samples.states[sample])


def test_a_group_is_shown_side_by_side(page: Any, run: flowmill.Run) -> None:
    page.session_state["view"] = "Group"
    page.run()
    assert not page.exception
    group = widget(page, "selectbox", "Group").value
    samples = run.samples(1).to_pandas()
    members = samples[samples.group_id == group]
    opened = {button.key for button in page.button if button.label == "Open"}
    assert opened == {f"open {sample}" for sample in members.sample_id}


def test_what_is_chosen_in_one_epoch_breaks_no_other(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("rollout.prompts_per_epoch=8", "rollout.group_size=4")
    context = prepare(config)
    run_epoch(context, 1)
    run_epoch(context, 2)
    monkeypatch.setattr(sys, "argv", [PAGE, str(config.store.root), "small", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    page.number_input(key="page").set_value(2).run()
    reward = widget(page, "slider", "reward")
    reward.set_range((reward.min + reward.max) / 2, reward.max).run()
    page.selectbox(key="epoch").set_value(1).run()
    assert "small, epoch 1: " in page.subheader[0].value
    next(button for button in page.button if button.label == "Open").click().run()
    page.selectbox(key="epoch").set_value(2).run()
    assert page.selectbox(key="sample").value.startswith("e00002")
    assert not page.exception


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


def test_the_server_listens_on_loopback_alone_and_ends_with_a_signal(run: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "pandas.py").write_text("raise SystemExit('hidden')")
    command = [sys.executable, "-m", "flows.cli", "view", "small", "--root", run.store.root, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.3)
        listening = [each.laddr.ip for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
        assert set(listening) == {"127.0.0.1"}
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2) as answer:
            return bool(answer.read() == b"ok")
    except OSError:
        return False


def updates(run: flowmill.Run, sample: str) -> list[dict[str, Any]]:
    return run.trace(1, sample)["runs"]["small"]["updates"]  # type: ignore[no-any-return]


def test_the_table_begins_with_what_a_sample_earned() -> None:
    from flowmill.explorer import _in_order

    columns = ["sample_id", "seed", "prompt", "reward.digits", "advantage", "reward"]
    assert _in_order(columns) == ["reward", "advantage", "prompt", "reward.digits", "sample_id", "seed"]
