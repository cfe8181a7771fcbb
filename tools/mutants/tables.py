"""Which tests belong to which file, the mutants that are always run, and those no test can tell from the original."""

from __future__ import annotations

from dataclasses import dataclass

_RATES = ("tests/tasks/training/test_training.py",)
_OF_TRAINING = (
    "tests/tasks/training/test_training_stage.py",
    "tests/tasks/stages/test_stages.py::test_the_behavior_policy_follows_slowly_and_rolls_out",
    "tests/tasks/stages/test_stages.py::test_training_resumes_from_the_checkpoint_within_the_epoch[ema]",
    "tests/tasks/stages/test_stages.py::test_replayed_rows_have_log_probs_of_the_policy_before_the_epoch",
)
#: File -> test files, or some tests of one that takes minutes; those that fail soonest first.
TESTS: dict[str, tuple[str, ...]] = {
    "models/maths/transitions.py": (
        "tests/models/maths/test_transitions.py",
        "tests/tasks/algorithms/test_options.py",
        "tests/golden",
    ),
    "models/maths/kernels.py": (
        "tests/models/maths/test_transitions.py",
        "tests/tasks/algorithms/test_options.py",
        "tests/golden",
    ),
    "models/maths/schedules.py": (
        "tests/models/maths/test_schedules.py",
        "tests/tasks/algorithms/test_options.py",
        "tests/models/maths/test_transitions.py",
    ),
    "models/maths/sampling.py": ("tests/models/maths/test_sampling.py",),
    "models/maths/branching.py": ("tests/models/maths/test_sampling.py",),
    "tasks/advantages": ("tests/tasks/advantages/test_uncertainty.py", "tests/golden"),
    "tasks/advantages/groups.py": ("tests/tasks/advantages/test_groups.py", "tests/golden"),
    "tasks/algorithms/checks.py": (
        "tests/tasks/algorithms/test_options.py",
        "tests/tasks/modalities/test_replay.py",
        "tests/tasks/advantages/test_groups.py",
        "tests/tasks/modalities/test_combinations.py",
    ),
    "tasks/algorithms": (
        "tests/tasks/algorithms/test_options.py",
        "tests/tasks/algorithms/test_by_hand.py",
        "tests/tasks/algorithms/test_algorithms.py",
        "tests/golden",
    ),
    "tasks/modalities/rows.py": ("tests/tasks/modalities/test_reader.py", "tests/tasks/modalities/test_batches.py"),
    "tasks/modalities/reader.py": ("tests/tasks/modalities/test_reader.py", "tests/tasks/modalities/test_batches.py"),
    "tasks/modalities/diffusion/sample_sets.py": (
        "tests/tasks/modalities/test_batches.py",
        "tests/tasks/modalities/test_reader.py",
        "tests/tasks/modalities/test_replay.py",
    ),
    "tasks/modalities/sample_set.py": (
        "tests/tasks/modalities/test_batches.py",
        "tests/tasks/modalities/test_reader.py",
        "tests/tasks/modalities/test_replay.py",
    ),
    "tasks/modalities/proximal.py": ("tests/tasks/modalities/test_replay.py", _OF_TRAINING[-1]),
    "tasks/modalities/diffusion/replay.py": ("tests/tasks/modalities/test_replay.py", _OF_TRAINING[-1]),
    "tasks/training/metrics.py": ("tests/tasks/modalities/test_replay.py", "tests/tasks/training/test_updates.py"),
    "tasks/training/loop.py": (
        "tests/tasks/training/test_updates.py",
        "tests/tasks/modalities/test_reader.py",
        "tests/tasks/modalities/test_replay.py",
        "tests/tasks/training/test_training.py",
    ),
    **{f"tasks/training/{name}.py": _RATES for name in ("learning_rates", "loss_scaling")},
    "tasks/training": _OF_TRAINING,
}

#: Files that are mutated.
FILES = (
    *(f"models/maths/{name}.py" for name in ("transitions", "kernels", "schedules", "sampling", "branching")),
    "tasks/advantages/*.py",
    "tasks/algorithms/*.py",
    "tasks/training/*.py",
    *(f"tasks/modalities/{name}.py" for name in ("rows", "reader", "sample_set", "proximal")),
    *(f"tasks/modalities/diffusion/{name}.py" for name in ("sample_sets", "replay")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A mutant that is run every time."""

    name: str
    """What it breaks."""
    path: str
    """File."""
    before: str
    """Text that occurs once in the file."""
    after: str
    """What stands there instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A mutant that computes the same, or nothing that a test could hold."""

    path: str
    """File."""
    before: str
    """The changed line, without indentation."""
    after: str
    """The same line of the mutant."""
    reason: str
    """Why no test can tell."""


ALGORITHMS = "tasks/algorithms"
NAMED = (
    Named(
        name="TempFlow weighs quiet steps more",
        path=f"{ALGORITHMS}/tempflow.py",
        before="rows.advantages * step.std.detach() / rows.mean_std",
        after="rows.advantages * rows.mean_std / step.std.detach()",
    ),
    Named(
        name="TempFlow does not weigh",
        path=f"{ALGORITHMS}/tempflow.py",
        before="rows.advantages * step.std.detach() / rows.mean_std",
        after="rows.advantages",
    ),
    Named(
        name="Flash-GRPO weighs the other way round",
        path=f"{ALGORITHMS}/flash_grpo.py",
        before="weight = rectifiers(models.kernel, rows.grid) / rows.mean_rectifier",
        after="weight = rows.mean_rectifier / rectifiers(models.kernel, rows.grid)",
    ),
    Named(
        name="RAM moves away from what was rewarded",
        path=f"{ALGORITHMS}/ram.py",
        before="residual = rows.target - behavior",
        after="residual = behavior - rows.target",
    ),
    Named(
        name="FDFO goes to its mate",
        path=f"{ALGORITHMS}/fdfo.py",
        before="squared_error(moved, -direction)",
        after="squared_error(moved, direction)",
    ),
    Named(
        name="SPO does not pull back",
        path=f"{ALGORITHMS}/objectives.py",
        before="-advantages * ratio + advantages.abs() / (2 * bound) * (ratio - 1) ** 2",
        after="-advantages * ratio",
    ),
    Named(
        name="NFT prefers low advantages",
        path=f"{ALGORITHMS}/nft.py",
        before="preference(rows.advantages, self.scale)",
        after="preference(-rows.advantages, self.scale)",
    ),
    Named(
        name="NFT maximizes its loss",
        path=f"{ALGORITHMS}/nft.py",
        before="loss = self.scale * nft_loss(",
        after="loss = -self.scale * nft_loss(",
    ),
    Named(
        name="NFT swaps policy and behavior policy",
        path=f"{ALGORITHMS}/objectives.py",
        before="positive = beta * velocity + (1 - beta) * behavior",
        after="positive = beta * behavior + (1 - beta) * velocity",
    ),
    Named(
        name="DGPO pushes away from high advantages",
        path=f"{ALGORITHMS}/dgpo.py",
        before="weight * rows.advantages * live",
        after="-weight * rows.advantages * live",
    ),
    Named(
        name="DGPO weighs groups by how good they are",
        path=f"{ALGORITHMS}/objectives.py",
        before="beta * (error - reference_error)",
        after="beta * (reference_error - error)",
    ),
    Named(
        name="DGPO freezes the wrong side",
        path=f"{ALGORITHMS}/dgpo.py",
        before="torch.where(rows.advantages > 0, ratio > 1 + high",
        after="torch.where(rows.advantages < 0, ratio > 1 + high",
    ),
    Named(
        name="GRPO lowers what was rewarded",
        path=f"{ALGORITHMS}/objectives.py",
        before="torch.maximum(-advantages * ratio, -advantages * ratio.clamp(",
        after="torch.maximum(advantages * ratio, advantages * ratio.clamp(",
    ),
    Named(
        name="PPO's pessimistic bound is optimistic",
        path=f"{ALGORITHMS}/objectives.py",
        before="torch.maximum(-advantages * ratio, -advantages * ratio.clamp(",
        after="torch.minimum(-advantages * ratio, -advantages * ratio.clamp(",
    ),
    Named(
        name="Guard doubles the bias",
        path=f"{ALGORITHMS}/objectives.py",
        before="std * (log_ratio + terms * squared_error(mean, old_mean)",
        after="std * (log_ratio - terms * squared_error(mean, old_mean)",
    ),
    Named(
        name="Flow-DPPO lowers what was rewarded",
        path=f"{ALGORITHMS}/flow_dppo.py",
        before="-rows.advantages * ratio * mask",
        after="rows.advantages * ratio * mask",
    ),
    Named(
        name="AWM raises the error of what was rewarded",
        path=f"{ALGORITHMS}/awm.py",
        before="log_ratio = new - old",
        after="log_ratio = old - new",
    ),
    Named(
        name="DPO prefers the worse sample",
        path=f"{ALGORITHMS}/objectives.py",
        before="-torch.nn.functional.logsigmoid(-0.5 * beta",
        after="-torch.nn.functional.logsigmoid(0.5 * beta",
    ),
    Named(
        name="CRD rewards errors",
        path=f"{ALGORITHMS}/crd.py",
        before="preference(rows.advantages, self.scale)",
        after="preference(-rows.advantages, self.scale)",
    ),
    Named(
        name="OPD runs away from its teacher",
        path=f"{ALGORITHMS}/opd.py",
        before="loss = gaussian_kl(",
        after="loss = -gaussian_kl(",
    ),
    Named(
        name="KL pushes away from the base model",
        path=f"{ALGORITHMS}/grpo.py",
        before="loss + self.kl_coef * kl",
        after="loss - self.kl_coef * kl",
    ),
)

_SPLIT = ".split(torch.bincount(groups, minlength=len(history)).tolist())"
EQUIVALENT = (
    Equivalent(
        path="tasks/stages/optimize.py",
        before="return records[0].summary",
        after="return records[(-1)].summary",
        reason="the stage has one shard",
    ),
    Equivalent(
        path="tasks/modalities/sample_set.py",
        before="start = int(self.reader.epochs.max(initial=1)) - 1",
        after="start = int(self.reader.epochs.max(initial=0)) - 1",
        reason="the first epoch with samples is 1",
    ),
    Equivalent(
        path="models/maths/kernels.py",
        before="std = self.eta * following * torch.sqrt(inner.clamp(min=0))",
        after="std = self.eta * following * torch.sqrt(inner.clamp(min=(-1)))",
        reason="sigmas fall, so it is never below 0; the bound is for kernels that fuse and round otherwise",
    ),
    Equivalent(
        path="tasks/algorithms/objectives.py",
        before="shape = (int(units.max()) + 1, *values.shape[1:])",
        after="shape = (int(units.max()) + 2, *values.shape[1:])",
        reason="nobody reads the total of a unit that is not there",
    ),
    Equivalent(
        path="tasks/algorithms/objectives.py",
        before="0, units, advantages, extreme, include_self=False",
        after="(-1), units, advantages, extreme, include_self=False",
        reason="the first dimension of a vector is its last",
    ),
    Equivalent(
        path="tasks/algorithms/objectives.py",
        before="return totals.index_add(0, units, values)[units]",
        after="return totals.index_add((-1), units, values)[units]",
        reason="the first dimension of a vector is its last",
    ),
    *[
        Equivalent(
            path="tasks/advantages/groups.py",
            before=f'{start}.scatter_reduce_(0, groups, values, "{kind}")',
            after=f'{start}.scatter_reduce_((-1), groups, values, "{kind}")',
            reason="the first dimension of a vector is its last",
        )
        for start, kind in (
            ('low = torch.full_like(count, float("inf"))', "amin"),
            ('high = torch.full_like(count, float("-inf"))', "amax"),
        )
    ],
    Equivalent(
        path="tasks/advantages/groups.py",
        before=f"members = torch.argsort(groups, stable=True){_SPLIT}",
        after=f"members = torch.argsort(groups, stable=False){_SPLIT}",
        reason="torch sorts stably on CPU either way",
    ),
    *[
        Equivalent(path="tasks/training/loop.py", before="_AHEAD = 2", after=after, reason="how far reading is ahead")
        for after in ("_AHEAD = 3", "_AHEAD = 1")
    ],
    Equivalent(
        path="tasks/training/loop.py",
        before='loss = means.get("loss", 0.0)',
        after='loss = means.get("loss", 1.0)',
        reason="any finite number stands for the loss of an update without rows",
    ),
)


def own_tests(path: str) -> tuple[str, ...]:
    """Return the test files of a file: its own entry, or its folder's."""
    return TESTS[path] if path in TESTS else TESTS[path.rpartition("/")[0]]
