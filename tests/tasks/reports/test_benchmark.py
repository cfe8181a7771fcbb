"""Benchmarks: pinned samples, found again, with intervals and paired tests that are right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from configs.benchmark import FOLDER, Benchmark, load_benchmark
from configs.errors import ConfigError, FlowmillError
from configs.fingerprint import fingerprint
from configs.registry import resolve
from configs.schema import RunConfig
from flows.benchmark import benchmark as flow
from flows.requests import BenchmarkRequest
from flows.run_in_process import call
from models.rewards import REWARDS
from models.rewards.factory import bounds_of
from storage.layout import ArtifactRef
from tasks.algorithms import resampling
from tasks.algorithms.resampling import FEWEST, Estimate, chance_of_difference, mean_with_interval
from tasks.reports.benchmark import find_subject
from tasks.reports.benchmark_results import Result, compare, read_result
from tests.conftest import ROOT, FlowmillCommand
from tests.support.inside import prepare, run_epoch

Make = Callable[..., RunConfig]


def measure(benchmark: Path, *models: str, root: str, **others: Any) -> list[Result]:
    """Return the results of a benchmark, with the flow of the command."""
    found: list[Result] = call(flow, BenchmarkRequest(name=str(benchmark), models=[*models], root=root, **others))
    return found


def changed(benchmark: Path, **settings: Any) -> Path:
    """Return a benchmark of the same name with some other settings."""
    file = benchmark.parent / fingerprint([str(settings)]) / benchmark.name
    file.parent.mkdir()
    prompts = {"prompts": str(benchmark.parent / "list.txt")}
    file.write_text(yaml.safe_dump({**yaml.safe_load(benchmark.read_text()), **prompts, **settings}))
    return file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A benchmark of three prompts, two images each."""
    (tmp_path / "list.txt").write_text('"31"\n"32"\n"33"\n')
    settings: dict[str, Any] = {"prompts": "list.txt", "images": 2, "seed": 7, "steps": 3, "height": 16, "width": 32}
    settings["rewards"] = [{"name": "jpeg_compressibility"}, {"name": "digits"}]
    (tmp_path / "small-bench.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "small-bench.yaml"


def test_the_interval_is_that_of_the_mean() -> None:
    draw = np.random.default_rng(0)
    hits = 0
    for number in range(200):
        values = draw.normal(1.0, 2.0, 60)
        found = mean_with_interval(values, seed=number)
        assert found.mean == pytest.approx(values.mean())
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 200 <= 0.985, "95 % intervals hold the mean 95 % of the time"
    values = draw.normal(0.0, 1.0, 500)
    found = mean_with_interval(values)
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 500**0.5, rel=0.05)
    constant = mean_with_interval(np.full(FEWEST, 0.5))
    assert constant.low == constant.high == 0.5
    few = mean_with_interval(np.arange(FEWEST - 1.0))
    assert few.mean == (FEWEST - 2) / 2
    assert few.low is few.high is None


#: Name, how many draws are made, and their mean: even, leaning, shares of four images, all or nothing, differences.
DRAWS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "even": (lambda draw, n: draw.normal(0.0, 1.0, n), 0.0),
    "leaning": (lambda draw, n: draw.exponential(1.0, n), 1.0),
    "of four": (lambda draw, n: draw.binomial(4, 0.9, n) / 4, 0.9),
    "all or nothing": (lambda draw, n: draw.binomial(1, 0.9, n).astype(float), 0.9),
    "differences": (lambda draw, n: draw.choice([-1.0, 0.0, 1.0], n, p=[0.1, 0.5, 0.4]), 0.3),
}


@pytest.mark.parametrize("count", [FEWEST, 2 * FEWEST])
@pytest.mark.parametrize("name", DRAWS)
def test_intervals_hold_with_few_prompts(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(resampling, "_RESAMPLES", 1000)
    make, mean = DRAWS[name]
    draw = np.random.default_rng(1)
    found = [mean_with_interval(make(draw, count), seed=number) for number in range(1000)]
    held = sum(each.low is not None and each.high is not None and each.low <= mean <= each.high for each in found)
    assert held / 1000 >= 0.93, "95 %, less two standard errors of a thousand tries and what is discrete"


@pytest.mark.parametrize("name", ["digits", "quality_levels", "lexicon"])
def test_intervals_stay_within_the_bounds_of_a_score_and_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Scores near a bound, where t and the bootstrap reach beyond it."""
    monkeypatch.setattr(resampling, "_RESAMPLES", 1000)
    bounds = bounds_of(name)
    assert bounds is not None
    low, high = bounds
    draw, held, beyond = np.random.default_rng(2), 0, 0
    for number in range(300):
        values = low + (high - low) * draw.binomial(4, 0.97, FEWEST) / 4
        found = mean_with_interval(values, bounds=bounds, seed=number)
        assert found.low is not None
        assert found.high is not None
        assert low <= found.low < found.high <= high
        held += found.low <= low + 0.97 * (high - low) <= found.high
        plain = mean_with_interval(values, seed=number)
        beyond += plain.high is not None and plain.high > high
    assert held / 300 >= 0.93
    assert beyond > 0
    # All equal: what could still be seen is not nothing.
    same = mean_with_interval(np.full(FEWEST, high), bounds=bounds)
    assert same.high == high
    assert same.low == pytest.approx(high - (high - low) * 0.1611, abs=1e-3 * (high - low))
    # A score beyond them shows that they are none.
    values = np.linspace(low, high + 1, FEWEST)
    assert mean_with_interval(values, bounds=bounds) == mean_with_interval(values)


def test_differences_stay_within_what_two_scores_can_differ_by() -> None:
    found = Estimate(mean=0.9, low=0.7, high=1.1)
    assert found.within(-1, 1) == Estimate(mean=0.9, low=0.7, high=1.0)
    assert found.within(0, 0.5) == found
    draw = np.random.default_rng(0)
    scores = [list(draw.binomial(2, share, FEWEST) / 2) for share in (0.02, 0.98)]
    about = {"title": "t", "policy": "", "images": "", "rewards": {}, "prompts": [""] * FEWEST}
    one, other = (
        Result(**about, model=str(n), scores={"digits": each}, bounds={"digits": [0, 1]})
        for n, each in enumerate(scores)
    )
    difference = compare(one, other, "digits").difference
    assert difference.high is not None
    assert difference.high <= 1


def test_rewards_that_are_documented_to_have_bounds_say_so() -> None:
    said = {"0 to 1": (0.0, 1.0), "-1 to 1": (-1.0, 1.0), "1 to 5": (1.0, 5.0)}
    rows = [line.split("|") for line in (ROOT / "docs/rewards.md").read_text().splitlines() if line.startswith("| `")]
    named = {cells[1].strip(" `"): re.search(r", (-?\d to \d)\b", cells[2]) for cells in rows}
    found = {name: said[match[1]] for name, match in named.items() if match and name in REWARDS}
    assert found == {name: bounds_of(name) for name in found}
    assert {"diversity", "exposure", "lexicon", "quality_levels", "reasoning_gym", "vlm_judge", "win_rate"} <= set(
        found
    )
    for name in REWARDS:
        # A perfect score is the best there is.
        perfect, bounds = getattr(resolve(REWARDS, name, label="reward"), "perfect", None), bounds_of(name)
        assert not isinstance(perfect, float) or (bounds is not None and bounds[1] == perfect), name


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"declares the bounds \(1, 0\); they must be two numbers"):
        bounds_of(f"{__name__}:Backwards")


class Backwards:
    bounds = (1, 0)

    def score(self, media: Any, prompts: Any, metadata: Any) -> Any:
        raise NotImplementedError


def test_wilsons_interval_is_the_published_one() -> None:
    values = np.array([1.0] * 81 + [0.0] * 182)
    found = mean_with_interval(values)
    # Newcombe 1998, table I: 81 of 263.
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))


def test_the_chance_is_that_of_all_flips() -> None:
    differences = np.array([0.5, 1.0, -0.25, 2.0, 0.75, 0.1, 0.3, -0.05])
    means = [abs((np.array(signs) * differences).mean()) for signs in product((1, -1), repeat=8)]
    exact = np.mean(np.array(means) >= abs(differences.mean()) - 1e-12)
    assert chance_of_difference(differences) == pytest.approx(exact, abs=0.01)
    assert chance_of_difference(np.zeros(5)) == 1.0
    assert chance_of_difference(np.full(40, 0.1)) < 0.001


def test_samples_are_those_of_the_pinned_settings_and_found_again(make_config: Make, small: Path) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    before, entries = context.chain.digest(), context.run.entries()
    root = context.store.root.uri
    first, second = measure(small, "small@0", "small@1", root=root)
    assert first.images != second.images
    assert first.policy != second.policy
    manifest = context.store.require(ArtifactRef.parse(first.images))
    options = manifest.options
    assert (options["samples"], options["steps"], options["seed"]) == (6, 3, 7)
    assert first.prompts == ['"31"', '"32"', '"33"']
    assert all(len(values) == 3 for values in first.scores.values())
    assert first.title == "small-bench, 2 per prompt, 3 euler steps, guidance 1, 16x32, float32, seed 7"
    (again,) = measure(small, "small@1", root=root)
    assert again == second
    context.run.refresh()
    assert (context.chain.digest(), context.run.entries()) == (before, entries), "the run itself is as it was"
    (other,) = measure(changed(small, seed=8), "small@1", root=root)
    assert other.images != second.images
    with pytest.raises(ConfigError, match="figures of different settings or prompts are not comparable"):
        compare(second, other, "digits")
    same = compare(second, again, "jpeg_compressibility")
    assert (same.difference.mean, same.p) == (0.0, 1.0)


@pytest.mark.slow
def test_processes_share_the_work_and_change_no_figure(make_config: Make, small: Path, tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        root = f"store.root={tmp_path / str(processes)}"
        context = prepare(make_config(root, "execution.rollout_batch_size=1"))
        (result,) = measure(small, "small@0", root=context.store.root.uri, processes=processes)
        found.append((result, [*context.store.records(ArtifactRef.parse(result.images))]))
    (one, of_one), (two, of_two) = found
    assert one.scores == two.scores
    assert [record.shard for record in of_one] == ["train-000000-000004", "train-000004-000006"]
    assert [record.shard for record in of_two][:2] == ["train-000000-000001", "train-000001-000002"]
    assert len({record.producer["pid"] for record in of_two}) == 2


def test_a_folder_is_measured_as_its_run_is(make_config: Make, small: Path, tiny_base: Path) -> None:
    context = prepare(make_config())
    root = context.store.root.uri
    of_run, of_folder = measure(small, "small@0", str(tiny_base), root=root, config=small.parent / "small.yaml")
    assert of_folder.scores == of_run.scores
    assert of_folder.model == "pipeline"
    assert find_subject(str(tiny_base), root=root, config=None).config.model.policy == "sd3"


def test_what_a_benchmark_lacks_is_said_before_anything_is_sampled(make_config: Make, small: Path) -> None:
    context = prepare(make_config())
    root = context.store.root.uri
    unfit = {"name": "latent_head", "options": {"head": "head.safetensors"}}
    for settings, said in (
        ({"rewards": [{"name": "tests.support.rewards:Missing"}]}, "Missing"),
        ({"rewards": [{"name": "tests.support.rewards:Crash"}]}, "division by zero"),
        ({"rewards": [unfit]}, "latents"),
        ({"height": 512}, "positions"),
    ):
        with pytest.raises(FlowmillError, match=said):
            measure(changed(small, **settings), "small@0", root=root)
    assert not (Path(root) / "evaluations").exists()


def test_results_are_files_that_compare(tmp_path: Path) -> None:
    scores = {"a": [0.0, 1.0, 0.5]}
    one = Result(
        title="t, x", model="r@1", policy="p", images="i", rewards={"a": "r"}, prompts=list("xyz"), scores=scores
    )
    file = one.write(tmp_path / "out")
    assert file.name.startswith("t-r-at-1-")
    assert read_result(file) == one
    assert json.loads(file.read_text())["figures"]["a"]["mean"] == 0.5
    for text in ("", "[]", '{"format": 9}', '{"format": 1, "figures": {}}'):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ConfigError, match=r"holds no result|of another version"):
            read_result(tmp_path / "broken.json")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_built_in_benchmark_is_one(file: Path) -> None:
    found = load_benchmark(file.stem, prompts=None if "\nprompts:" in file.read_text() else "given.txt")
    assert isinstance(found, Benchmark)
    assert found.name == file.stem
    assert found.prompts == "given.txt" or Path(str(found.prompts)).is_file()
    assert f"flowmill benchmark {file.stem}" in file.read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "Did you mean 'digits'"),
        ("geneval", "ships no prompts. Give its published list with --prompts"),
        ("nowhere.yaml", "does not exist"),
    ],
)
def test_a_benchmark_that_is_not_there_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_benchmark(name)


def test_malformed_benchmarks_are_named(tmp_path: Path) -> None:
    excluding = "{steps: 1, height: 1, width: 1, prompts: x, rewards: [{name: digits, on_failure: exclude_sample}]}"
    for text, said in (
        (excluding, "leaves samples out"),
        ("steps: 0", "steps"),
        ("- 1", "holds no settings"),
        ("a: [", "cannot be read"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_benchmark(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("small", "neither a folder nor RUN@EPOCH"),
        ("small@x", "neither a folder"),
        ("{tmp}", "has no model_index.json"),
    ],
)
def test_what_is_no_model_is_named(make_config: Make, tmp_path: Path, model: str, said: str) -> None:
    root = prepare(make_config()).store.root.uri
    with pytest.raises(ConfigError, match=said):
        find_subject(model.format(tmp=tmp_path), root=root, config=None)


def test_the_command_prints_a_table_and_keeps_results(
    make_config: Make, small: Path, tmp_path: Path, flowmill: FlowmillCommand
) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    common = ["--root", context.store.root.uri, "--out", str(tmp_path / "out")]
    ended = flowmill("benchmark", str(small), "--model", "small@0", "--model", "small@1", *common)
    assert ended.returncode == 0, ended.stderr
    assert "small-bench, 2 per prompt" in ended.stdout
    assert "small@1" in ended.stdout
    files = sorted((tmp_path / "out").glob("*.json"))
    assert len(files) == 2
    told = flowmill("status", "--root", context.store.root.uri).stdout
    assert "small-bench, 2 per prompt" in told
    states = {row.split("\t")[0]: row for row in told.splitlines() if "\t" in row}
    assert "stopped" in states["small"], "the small run itself is not finished"
    assert "benchmark" in next(row for name, row in states.items() if name.startswith("benchmark-small")).split("\t")[2]
    against = flowmill("benchmark", str(small), "--against", str(files[0]), "--against", str(files[1]), *common)
    assert against.returncode == 0, against.stderr
    assert "3 prompts" in against.stdout
    for arguments, said in ((["digit"], "Did you mean"), ([str(small)], "Nothing to measure")):
        failed = flowmill("benchmark", *arguments, *common)
        assert failed.returncode == 1
        assert said in failed.stderr
