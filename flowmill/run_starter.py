"""Starts runs from a user's program."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.configs.base import Component, Section
from flowmill.configs.errors import ConfigError
from flowmill.configs.exits import uninterrupted
from flowmill.configs.override_quoting import override_list
from flowmill.configs.schema import RunConfig
from flowmill.store_reader import Run

#: A reward: its name, settings, or a function or class of the caller's program.
RewardLike = str | Mapping[str, Any] | Component | Callable[..., Any]


def train(
    config: str | Path | RunConfig | None = None,
    *,
    model: str | Path | Mapping[str, Any] | Section | None = None,
    prompts: str | Path | Iterable[str] | Mapping[str, Any] | Section | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    algorithm: str | Mapping[str, Any] | Component | None = None,
    epochs: int | None = None,
    name: str | None = None,
    root: str | Path | None = None,
    overrides: str | Collection[str] = (),
    **sections: Mapping[str, Any] | Section,
) -> Run:
    """Train, and return the run; the same call again continues a run that was interrupted.

    Args:
        config: a preset, such as 'digits', a config file, or a config; the other arguments change it.
        model: folder of a model, or a ``flowmill.Model``.
        prompts: texts, or a file of prompts, or a ``flowmill.Prompts``.
        rewards: a function of images (B, H, W, 3) uint8, or texts, and prompts that returns B numbers; a class like
            ``flowmill.models.rewards.base.Reward``; a name of docs/rewards.md; a ``flowmill.Reward``; or several of
            these. The source of what a script or notebook defines is part of the run.
        algorithm: its name, or name and options.
        epochs: number of epochs.
        name: name of the run; that of the config, else of the script, else 'notebook', when absent.
        root: folder or s3://bucket/prefix of the store; FLOWMILL_ROOT, else the config's, when absent.
        overrides: settings, 'section.key=value' each; a text is one of them.
        **sections: further sections of a config, such as ``rollout=flowmill.Rollout(group_size=8)``.

    Raises:
        FlowmillError: a setting cannot work, or a run of this name has other settings; committed data stays.
    """
    from flowmill.configs.load import make_config, merged

    data = {key: _plain(value) for key, value in sections.items()}
    if model is not None:
        data["model"] = {"path": str(model)} if isinstance(model, str | Path) else _plain(model)
    if prompts is not None:
        plain = _plain(_as_list(prompts))
        data["prompts"] = plain if isinstance(plain, dict) else {"train": plain}
    if algorithm is not None:
        data["optimize"] = {**_section(data, "optimize"), "algorithm": _plain(algorithm)}
    run = {key: value for key, value in (("epochs", epochs), ("name", name)) if value is not None}
    if run:
        data["run"] = {**_section(data, "run"), **run}
    base, default_name, folder = _base(config)
    data = merged(base, data)
    if rewards is not None:
        several: Sequence[Any] = rewards if isinstance(rewards, list | tuple) else [rewards]
        data["rewards"] = [_reward(each, data) for each in several]
    where = "the arguments of flowmill.train"
    return start(
        make_config(data, override_list(overrides), where=where, name=default_name, folder=folder), root=root
    ).train()


def start(
    config: str | Path | RunConfig,
    *,
    root: str | Path | None = None,
    name: str | None = None,
    overrides: str | Collection[str] = (),
    rewind: bool = False,
) -> Run:
    """Return a new or existing run, whose stages can then be run; nothing is computed yet.

    Args:
        config: a preset, such as 'digits', a config file, or a config.
        root: folder or s3://bucket/prefix of the store; FLOWMILL_ROOT, else the config's, when absent.
        name: name of the run; the config's, else the file's, when absent.
        overrides: settings that override the config, 'section.key=value' each; a text is one of them.
        rewind: shorten a run that has more epochs than the config; otherwise it keeps them.

    Raises:
        FlowmillError: a setting cannot work, a run of this name has other settings, or another process executes it.
    """
    from flowmill.configs.load import load_config, make_config
    from flowmill.flows.environment import as_overrides, prepare_environment

    changes = [*override_list(overrides), *as_overrides(root, name)]
    if isinstance(config, RunConfig):
        data, default_name, folder = _base(config)
        ready = make_config(data, changes, where="the config", name=default_name, folder=folder).like(config)
    else:
        ready = load_config(config, changes)
    prepare_environment(ready.execution.threads)
    with uninterrupted():
        from flowmill.flows.process_state import begin
        from flowmill.storage.artifacts.commit import ArtifactStore
        from flowmill.tasks.checks.check import check_config
        from flowmill.tasks.inputs.shapes import with_columns
        from flowmill.tasks.inputs.store_trust import remember
        from flowmill.tasks.runs.epoch_count import kept_length
        from flowmill.tasks.runs.locks import holding, run_name

    ready = with_columns(ready)
    # Before the store is opened, which creates its folder.
    check_config(ready, rewards=False)
    # The length of a run that another process executes may change until it ends.
    with holding(ArtifactStore(ready.store), run_name(ready)):
        length = kept_length(ready, rewind=rewind)
        remember(length)
        return Run(begin(length))


def maker_of(section: type[Section], label: str) -> Callable[..., Any]:
    """Return the function that makes a section of settings; it refuses wrong ones with a ConfigError."""
    from flowmill.configs.load import checked

    def make(**settings: Any) -> Any:
        return checked(settings, section, lambda mistake: label)

    make.__name__ = make.__qualname__ = label.rpartition(".")[2]
    make.__doc__ = f"{section.__doc__}\n\nSettings: see ``{section.__module__}.{section.__name__}``."
    make.__signature__ = inspect.signature(section)  # type: ignore[attr-defined]
    return make


def _base(config: str | Path | RunConfig | None) -> tuple[dict[str, Any], str, Path]:
    """Return the data of a config, the name of its run if the data have none, and the folder of its paths."""
    from flowmill.configs.algorithm_defaults import without_own_followers
    from flowmill.configs.load import read_config
    from flowmill.configs.presets import config_file

    script = getattr(sys.modules["__main__"], "__file__", None)
    name = Path(script).stem if script else "notebook"
    if isinstance(config, RunConfig):
        return without_own_followers(config.model_dump(mode="json")), name, Path()
    if config is not None:
        file = config_file(config)
        return read_config(file), file.stem, file.parent
    return {}, name, Path()


def _as_list(prompts: object) -> object:
    """Return texts in any other collection as a list; their order is part of the run."""
    if isinstance(prompts, set | frozenset):
        raise ConfigError("prompts: a set has another order in each process. Give a list, such as sorted(prompts).")
    if isinstance(prompts, str | Path | Mapping | Section) or not isinstance(prompts, Iterable):
        return prompts
    return [*prompts]


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of data; an empty one if it is absent."""
    section = data.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{name}: {section!r} is no section. Give a mapping of settings.")
    return dict(section or {})


def _plain(value: Any) -> Any:
    """Return a section as data, with the settings that were given alone."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _reward(reward: RewardLike, data: dict[str, Any]) -> Any:
    """Return the settings of a reward; its source, and the folders of modules it comes from, are added to the data."""
    if isinstance(reward, str | Mapping | Section):
        return _plain(reward)
    from flowmill.carried_source import carried_source, imported_modules, is_importable, module_name, user_folders

    if not (inspect.isfunction(reward) or inspect.isclass(reward)):
        raise ConfigError(
            f"rewards: {reward!r} is no reward. Give a name, settings, a function, or a class with a method 'score'; "
            "an instance cannot be made again in other processes, its class can."
        )
    execution = _section(data, "execution")
    if is_importable(reward):
        module, attribute, used = reward.__module__, reward.__qualname__, [reward.__module__]
    else:
        source, module, attribute = carried_source(reward), module_name(reward), reward.__name__
        used = imported_modules(source)
        execution["sources"] = {**execution.get("sources", {}), module: source}
    if folders := user_folders(used):
        execution["modules"] = [*execution.get("modules", ()), *folders]
    data["execution"] = execution
    return {"name": f"{module}:{attribute}", "label": reward.__name__}
