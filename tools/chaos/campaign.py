"""Kills runs of every shape from their first second on, continues them, and compares digest and MLflow's curves.

``python -m tools.chaos.campaign --kills 500 --seed 0`` prints one table. A run is killed as a whole (its process
group), or its parent, its Prefect server, torchrun's agent or a rank alone; its group and its parent also get SIGTERM
("asked"). After each nothing of it may be alive 20 seconds later. After some kills a run may finish, and is compared
with one that nobody killed.

Runs of the shapes that are places (``tools.chaos.places``) lose a server, a cluster, a permission or their clock.
``--damages`` damages the store of a whole run of each shape (``tools.chaos.losses``).

With ``--tend`` a file of the store is damaged after each kill, and ``store verify``, ``repair`` and ``gc``, some of
them killed too, have it as it was before the run goes on (``tools.chaos.tending``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.flows.environment import prepare_environment
from tests.support.given import pairs, rated, write_jsonl
from tests.support.language_models import drawn_texts_data, texts_data
from tests.support.small import small_data, write_small
from tests.support.unified_models import unified_data
from tests.support.vision_classes import drawn_vision_data, vision_data
from tools.chaos.judging import Fits, Ratings, write_fit, write_rated
from tools.chaos.killing import RUN, Campaign, Disturbed, Sweeps
from tools.chaos.places import PLACES

_AVERAGE = "optimize.ema={decay: 0.9}"
SHAPES: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "checkpoints": ("optimize.updates_per_epoch=4", "execution.checkpoint_every=1"),
    "branch": (
        "rollout.plan={name: branch, options: {branches: 2}}",
        "optimize.algorithm={name: tempflow, options: {clip_range: 0.002}}",
    ),
    "nft, average": ("rollout.plan={name: final}", "optimize.algorithm={name: nft}", _AVERAGE),
    "replay": ("optimize.replay={epochs: 1}",),
    "parquet": ("rollout.store=parquet",),
    "lora": ("model.lora={rank: 2, alpha: 4}",),
    "two ranks": ("execution.processes=2", "optimize.updates_per_epoch=2", "execution.checkpoint_every=1"),
    "video": ("VIDEO",),
    "texts": ("TEXTS", "optimize.algorithm=grpo"),
    "images": ("IMAGES", "optimize.algorithm=grpo", "execution.checkpoint_every=1"),
    "critic": (
        "TEXTS",
        "optimize.algorithm=ppo",
        "advantage.estimator.options={kl_coef: 0.1, target_kl: 0.01, horizon: 64}",
        "execution.checkpoint_every=1",
    ),
    "render": ("DRAWN", "execution.checkpoint_every=1"),
    "turns": ("DRAWN", "render.turns={count: 2, comment: '{score}', comment_tokens: 3, done: '1', cost: 0.1}"),
    "seen turns": ("SEEN", "execution.checkpoint_every=1"),
    "unified": ("UNIFIED", "optimize.algorithm=grpo", "execution.checkpoint_every=1"),
    "dpo": ("PAIRS", "optimize.algorithm={name: dpo, options: {times: {count: 2}}}", "execution.checkpoint_every=1"),
    "kto": ("RATED", "optimize.algorithm={name: kto, options: {times: {count: 2}}}", "execution.checkpoint_every=1"),
    "sft": (
        "TEXTS",
        "ANSWERS",
        "optimize.algorithm=sft",
        "optimize.updates_per_epoch=3",
        "execution.checkpoint_every=1",
    ),
    "choices": ("prompts.sampler=informative", "execution.checkpoint_every=1"),
    "dask": ("execution.runner={name: dask}",),
    "sweep": (),
    "reward fit": ("FIT",),
    "rate": ("RATE",),
    "gradient": (
        "rewards=[{name: digits_network}]",
        "rollout.plan={name: final}",
        "optimize.algorithm={name: reward_gradient}",
        "execution.checkpoint_every=1",
    ),
    "fsdp": (
        "execution.processes=2",
        "execution.strategy=fsdp",
        "optimize.updates_per_epoch=2",
        "execution.checkpoint_every=1",
    ),
    "s3": ("S3",),
    **dict.fromkeys(PLACES, ()),
    # Models, groups and batches as large as people train them, for fewer epochs; a base model that is made once.
    "addition_ppo": ("PRESET", "run.epochs=3", "evaluate.every=3", "critic.alone_epochs=1"),
    "addition_grpo": ("PRESET", "run.epochs=3", "evaluate.every=3"),
}
#: Makes models and prompts of runs that are not of small images: given a folder, and a base model of images.
_DATA: Mapping[str, Callable[[Path, Path], dict[str, Any]]] = {
    "TEXTS": lambda folder, base: texts_data(folder),
    "IMAGES": lambda folder, base: vision_data(folder),
    "UNIFIED": lambda folder, base: unified_data(folder),
    "DRAWN": drawn_texts_data,
    "SEEN": drawn_vision_data,
}
#: Rows of given samples, and their columns; those of texts are the prompts with their answers.
_GIVEN: Mapping[str, tuple[Callable[[], list[dict[str, Any]]] | None, dict[str, Any]]] = {
    "PAIRS": (pairs, {"chosen": "chosen", "rejected": "rejected"}),
    "RATED": (rated, {"rating": "stars", "scale": [1, 5]}),
    "ANSWERS": (None, {"sample": "answer"}),
}
_CAMPAIGNS = {"reward fit": Fits, "rate": Ratings, "sweep": Sweeps}
_LINE = "{:13} {:>5}  {:50} {:>4}  {}\n"


def _write(name: str, folder: Path, base: Path) -> Path:
    """Write the config of a shape, and its prompts."""
    from flowmill.configs.load import load_config
    from flowmill.models.quickstart.addition import AdditionBuilder

    shape = SHAPES.get(name, ())
    if "FIT" in shape:
        return write_fit(folder)
    if "RATE" in shape:
        return write_rated(folder, base)
    settings = ["run.epochs=3", f"run.name={RUN}"]
    given = [each for each in shape if not each.isupper()]
    if name not in SHAPES:
        config = load_config(name, settings[1:])
    elif name == "video":
        config = load_config(Path("configs/tiny_wan21.yaml"), [*settings, "evaluate.every=1"])
    elif "PRESET" in shape:
        model = folder / "model"
        AdditionBuilder().build(model, lambda what, done, total: None)
        own = f"model={{policy: causal_lm, path: {model}}}"
        config = load_config(Path(f"configs/{name}.yaml"), [*settings, own, *given])
    else:
        made = next((make for kind, make in _DATA.items() if kind in shape), small_data)(folder, base)
        for make_rows, columns in (_GIVEN[kind] for kind in shape if kind in _GIVEN):
            answers = made["prompts"].pop("train")
            rows = answers if make_rows is None else str(write_jsonl(folder / "given", make_rows()))
            made["data"] = {"train": rows, **columns, "rows_per_shard": 1}
        config = load_config(write_small(folder, made), [*settings, *given])
    path = folder / f"{RUN}.yaml"
    path.write_text(config.to_yaml())
    return path


@contextlib.contextmanager
def _environment(shapes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Give the environment of all runs: with a bucket, where a shape wants one."""
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    if "s3" not in shapes:
        yield variables
        return
    from tests.support.s3 import make_bucket, named_or_moto

    with named_or_moto() as server:
        os.environ.update(server.variables())
        yield {**variables, **server.variables(), "FLOWMILL_TEST_BUCKET": make_bucket()}


def _carry_out(
    name: str, folder: Path, base: Path, environment: Mapping[str, str], options: argparse.Namespace
) -> bool:
    """Kill and damage runs of a shape, and print its line; return whether anything was wrong."""
    own = folder / Path(name).stem.replace(", ", "-").replace(" ", "-")
    own.mkdir()
    rng, config = random.Random(f"{options.seed}/{name}"), _write(name, own, base)
    with contextlib.ExitStack() as stack:
        campaign: Campaign
        if name in PLACES:
            place = stack.enter_context(PLACES[name](folder / f"at-{own.name}", rng, environment))
            campaign = Disturbed(config, rng, environment, place=place)
        else:
            campaign = _CAMPAIGNS.get(name, Campaign)(config, rng, environment, bucket=name == "s3")
        outcome = campaign.kill(campaign.expected(), options.kills, tend=options.tend)
        if options.damages:
            campaign.damage(outcome, options.damages, options.seed)
    by = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.kills.items()))
    verdict = "; ".join(outcome.wrong) or "equal, complete, none left"
    sys.stdout.write(_LINE.format(name, outcome.total, by, outcome.finished, verdict))
    if outcome.tended:
        sys.stdout.write(f"    {', '.join(f'{what} {count}' for what, count in sorted(outcome.tended.items()))}\n")
    sys.stdout.flush()
    return bool(outcome.wrong)


def main() -> None:
    """Carry out the campaign and print its table; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="in all, shared out among the shapes")
    parser.add_argument("--damages", type=int, default=0, help="of files of whole stores in all, shared out likewise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tend", action="store_true", help="damage, repair and clear up stores between the kills")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; may be given again")
    parser.add_argument("--config", action="append", default=[], help="a run of this config instead of the shapes")
    options = parser.parse_args()
    prepare_environment()
    from flowmill.models.quickstart.build import DigitsBuilder

    # Only runs on disks are tended.
    untended = {"s3", *_CAMPAIGNS, *PLACES} if options.tend else set()
    shapes = options.config + (options.shape or []) or [name for name in SHAPES if name not in untended]
    wrong = False
    with tempfile.TemporaryDirectory(prefix="flowmill-chaos-") as folder, _environment(shapes) as environment:
        for name in ("XDG_STATE_HOME", "PREFECT_HOME"):
            environment[name] = f"{folder}/{name.lower()}"
        base = Path(folder) / "base"
        DigitsBuilder(steps=20, vae_steps=20, images=500).build(base, lambda what, done, total: None)
        sys.stdout.write(
            "shape         kills  (by what)                              runs  digests, curves, processes\n"
        )
        for number, name in enumerate(shapes):
            share = {each: (getattr(options, each) + number) // len(shapes) for each in ("kills", "damages")}
            if any(share.values()):
                wrong |= _carry_out(
                    name, Path(folder), base, environment, argparse.Namespace(**{**vars(options), **share})
                )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
