"""Every stored vector is compared with something, or left out for a stated reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.golden.vectors import READ, load

#: One process: what these tests read is looked back at by the last of them.
pytestmark = pytest.mark.xdist_group("golden")

OWN_DRAWS = "every draw here is seeded from run, epoch, prompt, replica and step (tasks/runs/seeds.py)"
NO_DENSITY = "a step without noise has no log-prob; theirs is the constant 0"
#: File -> vector -> why nothing is compared with it.
LEFT_OUT: dict[str, dict[str, str]] = {
    **{
        f"flowfactory_{solver}_step.npz": {
            f"ode_{key}": NO_DENSITY for key in ("sampled_logp", "given_logp", "tnext_logp", "f64_given_logp")
        }
        for solver in ("euler", "unipc")
    },
    "losses.npz": {"guard_ff_ratio_shape": "a shape that holds for one shared timestep; ratios here have one per row"},
    "schedules.json": {
        **{f"prompt_seeds[]/{key}": OWN_DRAWS for key in ("prompt", "base_seed", "seed")},
        **{
            f"time_sampler/{seed}/{kind}": f"values drawn by the trainer's generator; {OWN_DRAWS}"
            for seed in (0, 1, 2)
            for kind in ("logit_normal", "uniform", "discrete", "discrete_with_init", "discrete_wo_init")
        },
    },
}


def test_every_vector_is_compared_or_left_out_for_a_reason(golden_dir: Path, request: pytest.FixtureRequest) -> None:
    defined = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    selected = {getattr(item, "originalname", item.name) for item in request.session.items}
    if not defined <= selected:
        pytest.skip("what was read is known only after all of tests/golden: some of its tests are not selected")
    if hasattr(request.config, "workerinput") and not request.config.getoption("loadgroup"):
        pytest.skip("what was read is known to one process only: run with --dist loadgroup")
    for file in sorted(path.name for path in golden_dir.glob("*.*") if path.suffix in (".npz", ".json")):
        stored = load(golden_dir, file)[0].keys_of_leaves()
        read = {key for name, key in READ if name == file}
        left_out = set(LEFT_OUT.get(file, {}))
        assert stored - read - left_out == set(), f"{file}: vectors nothing is compared with"
        assert left_out & read == set(), f"{file}: read, but listed as left out"
    if golden_dir == Path(__file__).parent / "data":
        assert {(file, key) for file, keys in LEFT_OUT.items() for key in keys} <= {
            (file, key) for file in LEFT_OUT for key in load(golden_dir, file)[0].keys_of_leaves()
        }
