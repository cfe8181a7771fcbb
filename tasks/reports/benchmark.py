"""Benchmarks: models on pinned samples, with confidence intervals.

Images and scores are artifacts like those of any evaluation, so every run reuses the committed ones. The flow
``benchmark`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.benchmark import Benchmark
from configs.errors import ConfigError
from configs.execution import ExecutionSection
from configs.fingerprint import fingerprint
from configs.load import load_config, parse_config
from configs.registry import resolve
from configs.rewards import RewardSection
from configs.schema import PromptsSection, RunConfig
from models.library_loading import read_json
from models.policies import POLICIES
from models.policies.pipeline_index import index_file
from models.rewards.factory import bounds_of
from storage.layout import ArtifactRef
from tasks.checks.check_execution import check_devices
from tasks.checks.check_rewards import check_rewards
from tasks.inputs.model_settings import check_model
from tasks.inputs.prompts import read_prompts
from tasks.inputs.source_prompts import source_prompts
from tasks.inputs.store_trust import check_trusted
from tasks.metrics.describe import BENCHMARK
from tasks.metrics.evaluations import scores_by_prompt
from tasks.reports.benchmark_results import Result
from tasks.runs.context import RunContext
from tasks.runs.opening import begin_run, open_run
from tasks.runs.progress import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to measure."""

    label: str
    """Its name in the table."""
    config: RunConfig
    """Config of its run, or of a folder."""
    policy: ArtifactRef | None
    """Policy artifact; None: the base model itself."""


def find_subject(model: str, *, root: str, config: Path | None, trusted: bool = False) -> Subject:
    """Return the model that RUN@EPOCH or the folder of a pipeline identifies.

    Args:
        model: RUN@EPOCH or a folder, as the user writes it.
        root: the store.
        config: for a folder: a config with its family and options.
        trusted: use code that only the store's record of the run names.

    Raises:
        TrustError: the store names code that the user did not request.
        ConfigError: ``model`` is neither, or the family of a folder is ambiguous.
        StoreError: there is no such run.
        NotCommittedError: the epoch is not committed yet.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Subject(label=folder.name, config=_folder_config(folder, root, config), policy=None)
    run, at, epoch = model.rpartition("@")
    if not at or not epoch.isdigit():
        raise ConfigError(f"--model '{model}' is neither a folder nor RUN@EPOCH, such as digits@30.")
    context = open_run(root, run, reads=True)
    if not trusted:
        check_trusted(context.config, context.config, run=run)
    return Subject(label=model, config=context.config, policy=context.policy_ref(int(epoch)))


def pinned_run(benchmark: Benchmark, subject: Subject, *, root: str, processes: int, reporter: Reporter) -> RunContext:
    """Return the run whose evaluations are those of a benchmark: the subject's model, the benchmark's other settings.

    Args:
        benchmark: the pinned settings.
        subject: the model.
        root: the store.
        processes: number of processes on this machine; figures do not depend on it.
        reporter: shows progress.

    Raises:
        ConfigError: a reward cannot work, or the model does not support the pinned settings.
    """
    pinned = _pinned(benchmark, subject, root, processes)
    check_model(pinned)
    check_devices(pinned)
    check_rewards(pinned, source_prompts(pinned), build=False)
    context = begin_run(pinned, reporter=reporter)
    if context.run.newest(BENCHMARK) is None:
        context.run.add(BENCHMARK, {"title": benchmark.title})
    return context


def result_of(
    benchmark: Benchmark,
    subject: Subject,
    context: RunContext,
    *,
    policy: ArtifactRef,
    images: ArtifactRef,
    scored: Mapping[str, ArtifactRef],
) -> Result:
    """Return the result of a benchmark for one model from the artifacts of its evaluation.

    Args:
        benchmark: the pinned settings.
        subject: the model.
        context: the run of ``pinned_run``.
        policy: the policy.
        images: its samples.
        scored: their scores by reward.
    """
    listed = context.prompts["train"]
    means = {reward: scores_by_prompt(context.store, ref) for reward, ref in scored.items()}
    return Result(
        title=benchmark.title,
        model=subject.label,
        policy=str(policy),
        images=str(images),
        rewards={reward: str(ref) for reward, ref in scored.items()},
        prompts=[prompt.text for prompt in listed],
        scores={reward: [scores[prompt.id] for prompt in listed] for reward, scores in means.items()},
        bounds={each.slot: found for each in context.config.rewards if (found := bounds_of(each.name)) is not None},
    )


def _pinned(benchmark: Benchmark, subject: Subject, root: str, processes: int) -> RunConfig:
    """Return the config of an evaluation-only run: the subject's model, the benchmark's other settings."""
    model = {
        **subject.config.model.fingerprinted({"start", "start_config"}),
        **{
            name: getattr(benchmark, name) for name in ("height", "width", "guidance_scale", "negative_prompt", "dtype")
        },
    }
    assert benchmark.prompts is not None
    count = len(_prompts_of(benchmark))
    ema = subject.config.optimize.ema
    data: dict[str, Any] = {
        "run": {"epochs": 0},
        "store": {**subject.config.store.model_dump(mode="json"), "root": root},
        "model": model,
        "prompts": {"train": benchmark.prompts, "column": benchmark.column, "split": benchmark.split},
        "rollout": {"prompts_per_epoch": 1},
        "rewards": [section.model_dump(mode="json") for section in benchmark.rewards],
        "evaluate": {
            "samples": count * benchmark.images,
            "steps": benchmark.steps,
            "solver": benchmark.solver,
            "seed": benchmark.seed,
        },
        "optimize": {} if ema is None else {"ema": ema.model_dump(mode="json")},
        # The batch size is that of the subject's run: kernels depend on it, so it affects results.
        "execution": {**subject.config.execution.model_dump(mode="json"), **_HERE, "processes": processes},
    }
    identity = {name: data[name] for name in ("model", "prompts", "rewards", "evaluate", "optimize")}
    data["run"]["name"] = f"benchmark-{benchmark.name}-{fingerprint(identity)[:8]}"
    return parse_config(data, where=f"benchmark '{benchmark.name}'")


#: Execution settings of every measurement, regardless of those of training.
_ALONE = ("nodes", "strategy", "fsdp_size", "offload", "sampling", "context_parallel")
_HERE = {
    **{name: ExecutionSection.model_fields[name].default for name in _ALONE},
    "launcher": {"name": "local"},
    "runner": {"name": "threads"},
    "ahead": 0,
}


def _prompts_of(benchmark: Benchmark) -> list[Any]:
    assert benchmark.prompts is not None
    section = PromptsSection(train=benchmark.prompts, column=benchmark.column, split=benchmark.split)
    return read_prompts(benchmark.prompts, section, where=f"benchmark '{benchmark.name}': prompts")


def _folder_config(folder: Path, root: str, config: Path | None) -> RunConfig:
    if config is not None:
        data = load_config(config).model_dump(mode="json")
        others = dict.fromkeys(("revision", "single_file", "build", "lora", "checkpoint", "start"))
        data["model"] |= {"path": str(folder.resolve()), **others}
        return parse_config(data, where=str(config))
    model = {"policy": _family_of(folder), "path": str(folder.resolve())}
    nothing = RewardSection(name="constant").model_dump(mode="json")
    return parse_config(
        {"store": {"root": root}, "model": model, "prompts": {"train": "."}, "rewards": [nothing]}, where=str(folder)
    )


def _family_of(folder: Path) -> str:
    """Return the only family that loads a pipeline's class; ConfigError if there is not exactly one."""
    index = index_file(folder)
    if not index.is_file():
        raise ConfigError(
            f"--model '{folder}' has no model_index.json of diffusers. Name the policy of another model with --config."
        )
    try:
        kind = read_json(index).get("_class_name")
    except ValueError as error:
        raise ConfigError(f"--model: {error}. Copy or download the pipeline again.") from None
    found = [name for name in POLICIES if resolve(POLICIES, name, label="model.policy").pipeline_name == kind]
    if len(found) != 1:
        raise ConfigError(
            f"--model '{folder}' is a {kind}, which {' and '.join(found) or 'no family of flowmill'} load. Say which "
            "with --config, a config whose model.policy and options are meant."
        )
    return found[0]
