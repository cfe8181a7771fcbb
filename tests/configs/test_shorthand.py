"""Names without options, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.configs.algorithm_defaults import FORWARD, PER_TOKEN, STATES
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.presets import preset_gpu, preset_line, presets
from flowmill.configs.registry import create
from flowmill.flows.cli.error_reporting import refuse_bare_settings
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from tests.conftest import ROOT


def test_a_name_alone_is_a_component() -> None:
    whole = load_config("digits", ["optimize.algorithm={name: grpo}", "rollout.plan={name: all}"])
    clipped = load_config("digits", ["optimize.algorithm=grpo", "optimize.algorithm.options.clip_range=0.1"])
    assert clipped.optimize.algorithm.options == {"clip_range": 0.1}
    assert load_config("digits", ["optimize.algorithm=grpo", "rollout.plan=all"]) == whole
    assert load_config("digits", ["rewards=[digits]"]).rewards == load_config("digits").rewards


def test_the_plan_follows_the_algorithm_where_it_is_left_out(tmp_path: Path) -> None:
    assert load_config("digits", ["optimize.algorithm=nft"]).rollout.plan.name == "final"
    assert load_config("digits", ["optimize.algorithm=tempflow"]).rollout.plan.name == "all"
    assert load_config("digits", ["run.epochs=1"]) == load_config("digits").model_copy(
        update={"run": load_config("digits").run.model_copy(update={"epochs": 1})}
    )
    given = load_config("digits", ["optimize.algorithm=nft", "rollout.plan=all"])
    assert given.rollout.plan.name == "all"
    assert load_config("digits", ["rollout.plan.options.last=sde"]).rollout.plan.options == {"last": "sde"}
    # A plan that a file names is never another's.
    window = load_config("digits_window", ["optimize.algorithm=nft"])
    assert window.rollout.plan.name == "window"


def test_algorithms_that_need_final_latents_are_known() -> None:
    given = {"opd": {"teacher": "somewhere"}}
    made = {name: create(ALGORITHMS, name, given.get(name, {}), label="algorithm") for name in ALGORITHMS}
    needs = {name for name, algorithm in made.items() if algorithm.requires.data == "forward"}
    assert needs == FORWARD
    assert {name for name, algorithm in made.items() if algorithm.requires.data == "states"} == STATES


def test_algorithms_that_need_advantages_of_tokens_are_known() -> None:
    given = {"dr_grpo": {"constant": 4}}
    made = {name: create(TOKEN_ALGORITHMS, name, given.get(name, {}), label="x").requires for name in TOKEN_ALGORITHMS}
    assert {name for name, requires in made.items() if requires.critic or requires.per_token} == set(PER_TOKEN)
    estimators = {name: create(ESTIMATORS, estimator, {}, label="x") for name, estimator in PER_TOKEN.items()}
    for name, estimator in estimators.items():
        assert estimator.per_token
        assert estimator.needs_values == made[name].critic


def test_every_preset_has_a_line_and_the_memory_of_the_page() -> None:
    page, rows = (ROOT / "docs" / "gpus.md").read_text(), dict[str, str]()
    for table in ("memory", "language"):
        head, *found = page.partition(f"<!-- {table} -->\n")[2].partition("<!-- end")[0].splitlines()
        place = [cell.strip() for cell in head.split("|")].index("one GPU of")
        cells = [[cell.strip() for cell in line.split("|")] for line in found]
        rows |= {line[1].strip("`"): line[place] for line in cells}
    for name in presets():
        assert preset_gpu(name) == rows.get(name, "CPU")
        assert 10 < len(preset_line(name)) < 200


@pytest.mark.parametrize("given", ["optimize.algorithm=nft", "+run.epochs=3"])
def test_settings_of_other_programs_get_a_hint(given: str) -> None:
    with pytest.raises(ConfigError, match="--set "):
        refuse_bare_settings(["run", "digits", given])
    refuse_bare_settings(["run", "digits", "--set", given])
