"""Refuses misspelled names of components, and files that do not exist, without heavy imports.

``check_config`` finds all of these and much more, but has to import torch first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flowmill.configs import introspection
from flowmill.configs.components import components
from flowmill.configs.errors import ConfigError, FlowmillError, PromptError
from flowmill.configs.overrides import blamed
from flowmill.configs.path_types import looks_local
from flowmill.configs.registry import unknown
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import near_path, nearest
from flowmill.configs.user_directories import user_path
from flowmill.models.engines import CHAIN_ENGINES, ENGINES
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import REWARDS
from flowmill.models.weights.pretrained_loading import check_model_folder, holds_model
from flowmill.storage.backends import ROOTS
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.algorithms import algorithms_of
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.execution.launchers import LAUNCHERS
from flowmill.tasks.execution.runners import RUNNERS
from flowmill.tasks.inputs.option_paths import OptionPath, places
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.rows.files import is_there
from flowmill.tasks.inputs.rows.row import LINES, OTHERS, ending_of
from flowmill.tasks.runs.locks import run_name

_SEEN_FROM = "Paths in options are relative to the working directory."


def check_names(
    config: RunConfig, *, source: Path | None = None, overrides: Sequence[str] = (), later: bool = False
) -> None:
    """Check that every component of a table, and every local file, that a config names exists.

    Args:
        source: the config file; suggestions also search its folder.
        overrides: ``section.key=value`` strings applied to it, which messages name as the cause.
        later: paths in options (``flowmill.configs.path_types``) may be missing for now, except those of overrides.
    """
    folders = (Path.cwd(), *(() if source is None else (source.parent,)))
    for setting, problem in _problems(config, folders):
        by = blamed(setting.split("."), overrides)
        raise type(problem)(f"{by}: {problem}") if by else problem
    check_places(config, overrides=overrides, later=later)


def check_places(config: RunConfig, *, overrides: Sequence[str] = (), later: bool = False) -> None:
    """Check that paths in options (``flowmill.configs.path_types``) exist; see ``check_names``."""
    for setting, problem in _lacking_places(config):
        by = blamed(setting.split("."), overrides)
        if by or not later:
            raise ConfigError(f"{by}: {problem}") if by else problem


def _problems(config: RunConfig, folders: Sequence[Path]) -> Iterator[tuple[str, FlowmillError]]:
    tables = _tables(config)
    for setting, component in components(config):
        table, name = tables[setting.rstrip(".0123456789")], component.name
        if name not in table and ":" not in name:
            yield f"{setting}.name", unknown(table, name, label="reward" if table is REWARDS else setting)
    scheme, is_uri, _ = config.store.root.partition("://")
    if is_uri and scheme not in ROOTS:
        yield "store.root", unknown(ROOTS, scheme, label="store.root: the scheme")
    try:
        run_name(config)
    except ConfigError as error:
        yield "run.name", error
    yield from _files(config, folders)


def _tables(config: RunConfig) -> dict[str, Mapping[str, str]]:
    """Return the tables of components by setting; list items share the setting of the list."""
    return {
        "model.policy": POLICIES,
        "model.build": BUILDERS,
        "prompts.sampler": SAMPLERS,
        "rollout.sampler": KERNELS,
        "rollout.plan": PLANS,
        "rollout.solver": SOLVERS,
        "rollout.store": TRAJECTORY_STORES,
        "rollout.engine": CHAIN_ENGINES,
        "rollout.tokens.engine": ENGINES,
        "advantage.estimator": introspection.table("flowmill.tasks.advantages.estimators:ESTIMATORS"),
        "evaluate.solver": SOLVERS,
        "render.model.policy": POLICIES,
        "render.model.build": BUILDERS,
        "optimize.algorithm": algorithms_of(kind_name(config)),
        "optimize.optimizer": introspection.table("flowmill.tasks.training.optimizers:OPTIMIZERS"),
        "execution.launcher": LAUNCHERS,
        "execution.runner": RUNNERS,
        "rewards": REWARDS,
        "monitors": REWARDS,
        "evaluate.judges": REWARDS,
    }


def _lacking_places(config: RunConfig) -> Iterator[tuple[str, ConfigError]]:
    """Yield missing or unusable paths in options of components (``flowmill.configs.path_types``), by setting."""
    from flowmill.tasks.inputs.fits import Fits

    tables, fits = _tables(config), Fits(config.store)
    for setting, component in components(config):
        if isinstance(component, RewardSection) and component.server is not None:
            # Its paths are on the server's machine.
            continue
        for named in places(component, tables[setting.rstrip(".0123456789")], label=setting):
            place = f"{setting}.options.{named.option}"
            lacking = fits.lacking(named.path) if named.is_fit else _lacking(named)
            if lacking:
                problem = f": {lacking}" if named.is_fit else f" '{named.path}' {lacking}{_SEEN_FROM}"
                yield place, ConfigError(f"{place}{problem}")
            elif not named.is_file and ("ModelPlace" in named.kind or holds_model(Path(named.path))):
                try:
                    # Hub ids are no folders.
                    if Path(named.path).is_dir():
                        check_model_folder(Path(named.path), label=place)
                except ConfigError as error:
                    yield place, error


def _lacking(named: OptionPath) -> str:
    """Return the complaint on a path in an option; '' if it exists."""
    path = Path(named.path)
    if named.is_file and not path.is_file():
        return f"is no file. {_hint(named.path, (Path.cwd(),))}"
    if not named.is_file and not named.may_be_hub and not path.is_dir():
        return f"is no folder. {_hint(named.path, (Path.cwd(),), only_folders=True)}"
    return ""


def _files(config: RunConfig, folders: Sequence[Path]) -> Iterator[tuple[str, FlowmillError]]:
    for key, source in {**config.prompts.lists("train"), **config.prompts.lists("heldout")}.items():
        if isinstance(source, str) and (not is_there(source) or _is_misspelled(source, folders)):
            problem = (
                f"{key}: prompt file '{source}' does not exist. {_hint(source, folders)}Paths are relative to "
                "the config file."
            )
            yield key, PromptError(problem)
    models = {"model": config.model, **({} if config.render is None else {"render.model": config.render.model})}
    for where, model in models.items():
        path = model.path
        if path is not None and looks_local(path) and not user_path(path).is_dir():
            problem = f"{where}.path '{path}' is no folder. {_hint(path, folders, only_folders=True)}"
            yield f"{where}.path", ConfigError(f"{problem}Paths are relative to the config file.")


def _is_misspelled(source: str, folders: Sequence[Path]) -> bool:
    """Return whether a prompt source is meant as a file, with a misspelled suffix; others are dataset ids."""
    suffix = Path(source).suffix.lower()
    known = bool(suffix and not ending_of(source) and nearest(suffix, (*LINES, *OTHERS)))
    return known and not Path(source).exists() and near_path(source, folders) is not None


def _hint(path: str, folders: Sequence[Path], *, only_folders: bool = False) -> str:
    near = near_path(path, folders, only_folders=only_folders)
    return f"Did you mean '{near}'? " if near else ""
