"""The runs that a request completes, in order: those whose policies others start from come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flowmill.configs.errors import ConfigError, DataError, PromptError
from flowmill.configs.load import DECIDES, load_config
from flowmill.configs.presets import config_file, no_config
from flowmill.configs.schema import RunConfig
from flowmill.flows.environment import place_overrides
from flowmill.flows.requests import PipelineRequest

#: Sections of a request's overrides that hold for every run: where and how runs are executed, not their results.
_COMMON = ("store.", "execution.", "tracking.")


def chained(request: PipelineRequest) -> list[PipelineRequest]:
    """Return the requests of the runs to complete: those that the run starts from, the first one first, and its own.

    A run that has begun has recorded its start, and needs no other run again.
    """
    config = resolved_config(request)
    requests, names = [request], [config.run.name]
    while config.model.start_config is not None:
        from flowmill.tasks.runs.start import check_first, has_begun

        if has_begun(config):
            break
        start = str(config.model.start_config)
        if not config_file(start).exists():
            raise ConfigError(f"model.start_config '{start}' {no_config(start)}")
        first = PipelineRequest(
            config=start,
            root=config.store.root,
            overrides=[each for each in requests[0].overrides if _is_common(each.partition("=")[0].strip())],
            wait_minutes=request.wait_minutes,
            gpu_slots=request.gpu_slots,
        )
        following, config = config, resolved_config(first)
        if config.run.name in names:
            raise ConfigError(
                f"model.start_config: run '{config.run.name}' would start from itself: "
                f"{' <- '.join(map(str, [config.run.name, *names]))}. Remove the setting from one of the configs."
            )
        check_first(following, config)
        requests.insert(0, first)
        names.insert(0, config.run.name)
    return requests


def _is_common(setting: str) -> bool:
    return setting.startswith(_COMMON) and setting not in DECIDES


@contextmanager
def named(config: RunConfig, runs: Sequence[object]) -> Iterator[None]:
    """Name the run of a config in its refusals, if it is one of several runs."""
    try:
        yield
    except (ConfigError, PromptError, DataError) as error:
        if len(runs) < 2:
            raise
        raise type(error)(f"run '{config.run.name}': {error}") from error.__cause__


def resolved_config(request: PipelineRequest) -> RunConfig:
    """Return the config of a request: the file, with its overrides, root and name."""
    return load_config(request.config, [*request.overrides, *place_overrides(request.root, request.name)])
