"""Where work is cut into shards: nobody waits long, nothing is left out, what is begun may be finished otherwise."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.factory import needs_of
from flowmill.tasks.runs.sharding import costs, cover, evaluation_cuts, idle_share, makespan, planned_cuts, rollout_cuts
from tests.conftest import ROOT

SMALL = ("tiny_", "digit", "unified_", "words", "addition", "lexicon", "smollm")
FULL = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.name.startswith(SMALL)]
#: Whose rollouts leave a tenth or more idle on so many processes: they are too few, or in batches too large.
ON_8 = (
    *("flux1_enhancer", "flux1_kontext_enhancer", "janus_pro_1b_grpo", "qwen_05b_ppo", "qwen_image_enhancer"),
    "reasoning_grpo",
)
ON_32 = (
    *(
        *ON_8,
        "qwen_05b_grpo",
        "qwen25_vl_3b_grpo",
        "sd15_refl",
        "sd35_gardo",
        "cogvideox_2b",
        "hunyuan_video15_480p",
        "ltx2",
    ),
    *("sana_video_2b", "wan21_1_3b", "wan22_ti2v_5b"),
)


def test_one_process_gets_shards_of_one_size() -> None:
    assert planned_cuts(10, batch=2, ranks=1, units=(1, 2), largest=4) == (4, 8, 10)


def test_shards_shrink_towards_the_end() -> None:
    """40 units, 2 processes: half of them in two shards of at most 8, then half of the rest, ... then one by one."""
    ends = planned_cuts(40, batch=1, ranks=2, units=(1,), largest=8)
    sizes = [end - start for start, end in pairwise((0, *ends))]
    assert sizes == [8, 8, 6, 6, 3, 3, 1, 1, 1, 1, 1, 1]
    assert idle_share(ends, batch=1, ranks=2) == 0


def test_groups_are_cut_only_where_that_saves_time() -> None:
    """48 groups of 24 in batches of 12 on 32: whole ones take 2 rounds of 2 batches, halves 3 rounds of one."""
    whole = planned_cuts(48 * 24, batch=12, ranks=32, units=(24,), largest=96)
    parts = planned_cuts(48 * 24, batch=12, ranks=32, units=(24, 12), largest=96)
    assert (makespan(costs(whole, 12), 32), makespan(costs(parts, 12), 32)) == (4, 3)
    assert all(end % 24 == 0 for end in whole)
    # On 8 whole ones leave nobody waiting.
    assert all(end % 24 == 0 for end in planned_cuts(48 * 24, batch=12, ranks=8, units=(24, 12), largest=96))


def test_few_padded_rows_are_computed() -> None:
    """16 groups of 4 in batches of 16: four groups share a batch rather than that 16 processes compute one each."""
    assert planned_cuts(64, batch=16, ranks=32, units=(4, 16), largest=16) == (16, 32, 48, 64)


def test_no_shard_is_larger_than_asked_for() -> None:
    """Of one group of 4 at most, though four would share a batch of 16."""
    assert planned_cuts(16, batch=16, ranks=2, units=(4, 16), largest=4) == (4, 8, 12, 16)


def test_makespan_takes_shards_in_order() -> None:
    assert makespan([3, 1, 1, 2], 2) == 4
    assert idle_share((3, 4, 5, 7), batch=1, ranks=2) == pytest.approx(1 - 7 / 8)
    assert idle_share((1,), batch=1, ranks=4) == 0.75
    assert idle_share((2,), batch=4, ranks=1) == 0.5
    assert idle_share((2, 4), batch=2, ranks=4, times=2) == 0
    assert idle_share((), batch=2, ranks=4) == 0


def test_committed_ranges_stay_and_gaps_are_cut() -> None:
    assert cover((4, 8, 10), []) == [(0, 4), (4, 8), (8, 10)]
    assert cover((4, 8, 10), [(6, 9), (0, 3)]) == [(0, 3), (3, 4), (4, 6), (6, 9), (9, 10)]
    # Of overlapping ones, that two processes may have made, the first counts.
    assert cover((4, 8, 10), [(0, 6), (4, 8)]) == [(0, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32, 512])
@pytest.mark.parametrize(("total", "size", "batch"), [(1152, 24, 16), (16, 4, 4), (7, 1, 3), (1018, 12, 12)])
def test_cuts_cover_everything(total: int, size: int, batch: int, ranks: int) -> None:
    ends = planned_cuts(total, batch=batch, ranks=ranks, units=(size, batch), largest=4 * size)
    assert ends[-1] == total
    assert all(start < end <= start + 4 * size for start, end in pairwise((0, *ends)))


loaded = cache(load_config)


def on_ranks(path: Path, ranks: int) -> RunConfig:
    """Return a preset for a number of ranks."""
    config = loaded(path)
    return config.model_copy(update={"execution": config.execution.model_copy(update={"processes": ranks})})


@pytest.mark.parametrize(("ranks", "idle"), [(8, ON_8), (32, ON_32)])
def test_rollouts_of_full_presets_leave_nobody_waiting_but_where_the_docs_say_so(ranks: int, idle: list[str]) -> None:
    found = []
    for path in FULL:
        config = on_ranks(path, ranks)
        if config.data is not None:
            continue
        if idle_share(rollout_cuts(config), batch=config.execution.rollout_batch_size, ranks=ranks) >= 0.1:
            found.append(path.stem)
    assert found == sorted(idle)
    reported = (ROOT / "docs" / "scaling.md").read_text()
    assert [name for name in idle if f"`{name}`" not in reported] == []


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_no_cut_of_a_preset_makes_anyone_wait_whom_whole_batches_would_not(ranks: int) -> None:
    """Ranks then idle because of the amount of work and the size of its batches alone."""
    assert len(FULL) > 20
    for path in FULL:
        config = on_ranks(path, ranks)
        batch = config.execution.rollout_batch_size
        # A reward that compares the samples of a group has them in one shard.
        together = any(needs_of(section.name, section.options).groupwise for section in config.scored)
        unit = max(config.rollout.group_size, batch) if together else batch
        for ends, whole in ((rollout_cuts(config), unit), (evaluation_cuts(config), batch)):
            rounds = math.ceil(math.ceil(ends[-1] / whole) / ranks) * math.ceil(whole / batch)
            assert makespan(costs(ends, batch), ranks) == rounds, path.name


@given(st.integers(1, 40), st.integers(1, 10), st.lists(st.tuples(st.integers(0, 39), st.integers(1, 5)), max_size=5))
def test_ranges_cover_everything_once_whatever_is_committed(total: int, size: int, done: list) -> None:
    committed, reach = [], 0
    for start, length in sorted(done):
        if start >= reach and start + length <= total:
            committed.append((start, start + length))
            reach = start + length
    ends = planned_cuts(total, batch=1, ranks=size, units=(1,), largest=size)
    ranges = cover(ends, committed)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    assert set(committed) <= set(ranges)
