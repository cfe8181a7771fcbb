"""Reports: one file, nothing fetched, nothing of a prompt carried out."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from flowmill.configs.escaping import visible
from flowmill.configs.paths import portable
from flowmill.flows import callbacks, process_state
from flowmill.tasks.metrics.evaluations import evaluation_figures, evaluation_grids
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report import charts, page, run_report, samples
from flowmill.tasks.reports.report.headline import SampleScores, headline
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.reports.report.samples import _encoded
from flowmill.tasks.reports.sample_lines import sample_lines
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from tests.conftest import ROOT, FlowmillCommand
from tests.support.inside import Make, evaluate, prepare, run_epoch
from tests.support.small import small_config

EVIL = '"41" <script>alert(1)</script>'


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.scripts += [""] * (tag == "script")
        self.refers += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def context(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder, monitors = tmp_path_factory.mktemp("report"), "monitors=[{name: jpeg_incompressibility}]"
    config = small_config(folder, tiny_base, monitors, "model.lora={rank: 2, alpha: 4}")
    (folder / "train.txt").write_text(EVIL + "\n" + "".join(f'"{n:02d}"\n' for n in range(3)))
    found = prepare(config)
    evaluate(found, 0)
    for epoch in (1, 2):
        run_epoch(found, epoch)
        evaluate(found, epoch)
    return found


@pytest.mark.parametrize(
    "values",
    [[0.313822959029011, 0.3138229590290112], [3e38, 3e38], [-3e38, 3e38], [0.0, 0.0], [-1.0], []],
    ids=["equal but for rounding", "equal and large", "far apart", "zero", "one", "none"],
)
def test_histograms_have_bins_for_all_values(values: list[float]) -> None:
    drawn = charts.histogram("rewards", {"epoch 1": np.array(values)}, along="reward")
    assert drawn.count("<rect") == len({round(value / (max(map(abs, values)) or 1), 9) for value in values})
    assert "nan" not in drawn.replace("mean nan", "")


def test_a_report_that_fails_leaves_its_run_finished(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(process_state, "reporter", lambda: SimpleNamespace(message=said.append))
    monkeypatch.setattr(callbacks, "run_report", Mock(side_effect=ValueError("too many bins")))
    assert callbacks.report_of(context) is None
    assert said[0].startswith("Everything is committed, but its report could not be drawn (ValueError: too many bins).")
    assert "flowmill report small" in said[0]
    monkeypatch.setattr(callbacks, "run_report", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        callbacks.report_of(context)


def test_a_report_is_whole_and_fetches_nothing(context: RunContext) -> None:
    html = run_report(context, price=2.0)
    page = Page(html)
    assert [name for name in page.refers if not name.startswith(("data:image/png;base64,", "#"))] == []
    assert page.scripts == [(ROOT / "tasks/reports/report/report.js").read_text()], "its own, and no other"
    assert [name for name in page.attributes if name.startswith("on")] == []
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert (
        f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        in html
    )
    assert EVIL in page.text, "as text"
    assert str(Path(context.store.root.uri).parent) not in html, "no place on a machine"
    # Pairs of the prompts of both lists and of the most changed; the best and the worst sample of four prompts.
    pictures = [name.partition(",")[2] for name in page.refers if name.startswith("data:")]
    run = read_run(context)
    shown = sum(map(len, run.pairs.values())) + len(run.changed)
    assert len(run.pairs["train"]) == 4
    assert len(pictures) == 2 * shown + 2 * 4
    assert all(Image.open(io.BytesIO(base64.b64decode(picture))).format == "PNG" for picture in pictures)
    for words in ("2 of 2 epochs are trained", "Evaluation: mean reward", "Ratio by step", "Monitors", "cost"):
        assert words in page.text, words
    assert re.search(r"rollout@2\s*trajectories/", page.text)
    assert "learning_rate: 0.001" in page.text
    assert run_report(context, price=2.0) == html, "drawn again, it is the same"


def test_lines_of_images_name_their_file(context: RunContext) -> None:
    (shot,) = [pair.after for pair in read_run(context).pairs["heldout"][:1]]
    _, line, place = sample_lines(RunView(context), 2, 1)
    assert line == f"  {shot.verdict}: {visible(shot.prompt)}"
    assert Path(place.removeprefix("  images: ")) == evaluation_grids(context.chain, 2)["heldout"]
    assert list(sample_lines(RunView(context), 2, 99))[-1] == place


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
    assert run.states["up to date"] > 0
    (rollouts,) = (cost for cost in run.costs if cost.stage == "rollout")
    assert rollouts.artifacts == 2
    assert rollouts.size == sum(context.store.require(context.chain.ref(Node(e, "rollout"))).size for e in (1, 2))


def test_runs_beside_each_other(context: RunContext, make_config: Make) -> None:
    other = prepare(make_config("run.name=other", "optimize.learning_rate=0.01"))
    page = Page(run_report(context, other))
    assert "Settings in which they differ" in page.text
    assert re.search(r"optimize.learning_rate\s*0.001\s*0.01", page.text)
    assert "0 of 2 epochs are trained" in page.text, "of a run that has not begun"


def test_the_best_and_worst_samples_are_found_without_a_row_per_sample(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One per prompt, ties by id; those at the mean are neither."""
    rewards = [float(number % 7) for number in range(700)]
    ids, prompts = ([f"{letter}{number // each:03d}" for number in range(700)] for letter, each in (("s", 1), ("p", 7)))
    columns = {"sample_id": ids, "prompt_id": prompts, "reward": pa.array([None, *rewards[1:]], pa.float32())}
    table = pa.table({**columns, "advantage": pa.array(rewards, pa.float32())})
    scored = Mock(wraps=samples._scored)
    monkeypatch.setattr(samples, "_scored", scored)
    monkeypatch.setattr(samples, "shots_of", lambda view, epoch, rows, **_: {row.sample_id: row for row in rows})
    best, worst = samples.extremes(RunView(context), 1, table)
    assert [row.sample_id for row in best] == [f"s{number}" for number in (699, 692, 685, 678, 671, 664)]
    assert [row.sample_id for row in worst] == [f"s{number:03d}" for number in (7, 14, 21, 28, 35, 42)]
    assert scored.call_count == 12
    assert samples.extremes(RunView(context), 1, table.slice(0, 1)) == ([], [])


def test_latents_without_images_have_no_gallery(make_config: Make) -> None:
    rewards = "rewards=[{name: tests.tasks.stages.test_scoring:Latent}]"
    found = prepare(make_config("run.epochs=1", rewards, "rollout.media={format: none, latents: true}"))
    run_epoch(found, 1)
    assert read_run(found).best == []
    assert "1 of 1 epochs are trained" in Page(run_report(found)).text


@pytest.mark.campaign
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


def test_pairs_are_of_one_prompt_and_seed_and_the_headline_is_the_result(context: RunContext) -> None:
    run = read_run(context)
    first, last = (evaluation_figures(context.chain, epoch) for epoch in (0, 2))
    slot = context.config.rewards[0].slot
    result = run.headline
    assert result is not None
    assert (result.split, result.prompts) == ("heldout", len(context.prompts["heldout"]))
    assert result.before.mean == first["heldout"][slot]["mean"]
    assert result.change.mean == pytest.approx(last["heldout"][slot]["mean"] - first["heldout"][slot]["mean"])
    assert result.change.low is None, "too few prompts"
    for pair in (*run.pairs["heldout"], *run.changed):
        assert (pair.before.sample_id, pair.before.prompt) == (pair.after.sample_id, pair.after.prompt)
    changes = [abs((pair.after.reward or 0) - (pair.before.reward or 0)) for pair in run.changed]
    assert changes == sorted(changes, reverse=True)
    assert len({pair.after.prompt for pair in run.changed}) == len(run.changed)


def test_intervals_are_over_prompts() -> None:
    def rows(scores: list[float]) -> list[SampleScores]:
        return [
            SampleScores(sample_id=f"{n}-{copy}", prompt_id=str(n), split="heldout", reward=score, verdict="")
            for n, score in enumerate(scores)
            for copy in range(2)
        ]

    before = [0.1 * (n % 5) for n in range(20)]
    after = [score + 0.1 + 0.01 * (n % 2) for n, score in enumerate(before)]
    result = headline(
        {"heldout": 0.2, "train": 0.0}, {"heldout": 0.305}, rows(before), rows(after), (-math.inf, math.inf)
    )
    assert result is not None
    assert (result.before.mean, result.after.mean, result.prompts) == (0.2, 0.305, 20)
    assert result.change.mean == pytest.approx(0.105)
    # Student's t with 19 degrees of freedom; half of the changes are 0.1, half 0.11.
    error = 2.093 * np.std([0.1, 0.11] * 10, ddof=1) / 20**0.5
    assert result.change.low == pytest.approx(0.105 - error, abs=2e-4)
    assert result.change.high == pytest.approx(0.105 + error, abs=2e-4)
    same = headline({"heldout": 0.2}, {"heldout": 0.2}, rows(before), rows(before), (-math.inf, math.inf))
    assert same is not None
    assert (same.change.mean, same.change.low) == (0.0, None)
    assert headline({"heldout": 0.2}, {"train": 0.3}, rows(before), rows(after), (-math.inf, math.inf)) is None


def test_texts_have_their_differences_marked() -> None:
    old, new = page._marked("a <b> 12\x1b", "a <i> 13\x1b")
    assert old == "a &lt;<del>b</del>&gt; <del>12</del>\\x1b"
    assert new == "a &lt;<ins>i</ins>&gt; <ins>13</ins>\\x1b"


def test_large_images_are_compressed_and_small_ones_are_exact() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 8, 2_000, 3), np.uint8)
    small, large = (Image.open(io.BytesIO(_encoded(pixels, 1024))) for pixels in (noise[0, :, :16], noise[1]))
    np.testing.assert_array_equal(np.asarray(small), noise[0, :, :16])
    assert (small.format, large.format, large.size) == ("PNG", "WEBP", (1024, 4))


def test_settings_name_no_place_on_a_machine() -> None:
    given = {
        "a": ["/home/me/p.txt", "s3://b/p", "org/model"],
        "b": {"c": r"C:\models\m", "d": 1, "e": "sqlite:////x/m.db"},
    }
    assert portable(given) == {"a": ["…/p.txt", "s3://b/p", "org/model"], "b": {"c": "…/m", "d": 1, "e": "…/m.db"}}


@pytest.mark.parametrize(
    ("low", "high", "whole", "labels"),
    [
        (0, 12, True, ["0", "2", "4", "6", "8", "10", "12"]),
        (1, 2, True, ["1", "2"]),
        (1, 1, True, ["0", "1", "2"]),
        (0.781, 0.977, False, ["0.80", "0.85", "0.90", "0.95"]),
        (-1e-4, 1e-4, False, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (0, 250_000, False, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
    ],
)
def test_axes_have_round_labels(low: float, high: float, whole: bool, labels: list[str]) -> None:
    scale = charts._Scale(low, high, (0, 100), ticks=6, least=float(whole))
    assert [label for _, label in scale.labels()] == labels
    places = [place for place, _ in scale.labels()]
    assert places == sorted(places)
    assert min(places) >= 0
    assert max(places) <= 100


def test_a_chart_leaves_out_what_is_not_a_number() -> None:
    drawn = charts.lines("t", {"a": [(1, float("nan")), (2, 1.0)], "b": [(1, float("inf"))]}, along="epoch", unit="s")
    assert drawn.count("<circle") == 1
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert "epoch 2: 1" in drawn
    assert "polyline" not in charts.lines("t", {}, along="epoch")
