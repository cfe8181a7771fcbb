"""Reports: one file, nothing fetched, nothing of a prompt carried out."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from configs.schema import RunConfig
from tasks.reports.report import run_report
from tasks.reports.report.content import read_run
from tasks.runs.context import RunContext
from tasks.specs.graph import Node
from tasks.stages.stage_run import StageRun
from tests.conftest import FlowmillCommand
from tests.support.inside import evaluate, make_stage, prepare, run_epoch

Make = Callable[..., RunConfig]
EVIL = '"41" <script>alert(1)</script>'


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def context(make_config: Make, tmp_path: Path) -> RunContext:
    config = make_config("monitors=[{name: jpeg_incompressibility}]", "model.lora={rank: 2, alpha: 4}")
    (tmp_path / "train.txt").write_text(EVIL + "\n" + "".join(f'"{n:02d}"\n' for n in range(3)))
    found = prepare(config)
    evaluate(found, 0)
    for epoch in (1, 2):
        run_epoch(found, epoch)
        evaluate(found, epoch)
    return found


def test_a_report_is_whole_and_fetches_nothing(context: RunContext) -> None:
    html = run_report(context, price=2.0)
    page = Page(html)
    assert [name for name in page.refers if not name.startswith(("data:image/png;base64,", "#"))] == []
    assert "script" not in page.tags
    assert EVIL in page.text, "as text"
    # 2 lists before and after; the best and the worst sample of each of four prompts.
    pictures = [name.partition(",")[2] for name in page.refers if name.startswith("data:")]
    assert len(pictures) == 4 + 2 * 4
    assert all(Image.open(io.BytesIO(base64.b64decode(picture))).format == "PNG" for picture in pictures)
    for words in (
        "2 of 2 epochs are trained",
        "Evaluation: mean reward",
        "Ratio by step",
        "Monitors",
        "cost",
    ):
        assert words in page.text, words
    assert re.search(r"rollout@2\s*trajectories/", page.text)
    assert "learning_rate: 0.001" in page.text
    assert run_report(context, price=2.0) == html, "drawn again, it is the same"


def test_what_is_reported_is_what_is_committed(context: RunContext) -> None:
    run = read_run(context)
    manifest = context.store.require(context.chain.require(2, "advantage").ref)
    assert run.curves["reward/mean"][-1] == (2, manifest.summary["reward_mean"])
    assert len(run.rewards[1]) == len(run.rewards[2]) == 16
    assert run.rewards[2].mean() == pytest.approx(manifest.summary["reward_mean"])
    assert run.spreads[2].mean() == pytest.approx(manifest.summary["group_std"], rel=1e-6)
    assert min(shot.reward for shot in run.worst) == run.rewards[2].min()
    assert max(shot.reward for shot in run.best) == run.rewards[2].max()
    assert len({shot.prompt for shot in run.best}) == len(run.best) == 4
    assert run.states["fresh"] > 0
    (rollouts,) = (cost for cost in run.costs if cost.stage == "rollout")
    assert rollouts.artifacts == 2
    assert rollouts.size == sum(context.store.require(context.chain.ref(Node(e, "rollout"))).size for e in (1, 2))


def test_runs_beside_each_other(context: RunContext, make_config: Make) -> None:
    other = prepare(make_config("run.name=other", "optimize.learning_rate=0.01"))
    page = Page(run_report(context, other))
    assert "Settings in which they differ" in page.text
    assert re.search(r"optimize.learning_rate\s*0.001\s*0.01", page.text)
    assert "0 of 2 epochs are trained" in page.text, "of a run that has not begun"


def test_latents_without_images_have_no_gallery(make_config: Make) -> None:
    rewards = "rewards=[{name: tests.tasks.stages.test_scoring:Latent}]"
    found = prepare(make_config("run.epochs=1", rewards, "rollout.media={format: none, latents: true}"))
    for stage, slot in (("rollout", ""), ("score", found.config.rewards[0].slot), ("advantage", ""), ("optimize", "")):
        StageRun(make_stage(found, stage, 1, slot)).execute()
    assert read_run(found).best == []
    assert "1 of 1 epochs are trained" in Page(run_report(found)).text


@pytest.mark.slow
def test_the_command_writes_and_logs_it(flowmill: FlowmillCommand, config_file: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    done = flowmill("run", str(config_file), "--root", root, "--set", "tracking.report=true", "--quiet")
    assert done.returncode == 0, done.stderr
    (logged,) = Path(root).rglob("report.html")
    assert "2 of 2 epochs are trained" in logged.read_text()
    logged.unlink()
    out = tmp_path / "new" / "small.html"
    done = flowmill("report", "small", "--root", root, "--out", str(out), "--track")
    assert done.returncode == 0, done.stderr
    assert logged.read_text() == out.read_text()
    unknown = flowmill("report", "smal", "--root", root)
    assert "Did you mean 'small'?" in unknown.stderr
