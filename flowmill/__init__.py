"""flowmill from Python: train, read runs as tables and images, and run stages from a notebook or Prefect flow.

    import flowmill

    run = flowmill.train("digits", epochs=3)
    run.samples(3).to_pandas()          # every sample of epoch 3, with rewards and advantage

Reading changes nothing, and imports torch and Prefect only when needed. The import sets environment variables of these
libraries that the user has not set: see ``flowmill.configs.library_settings``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowmill.configs.library_settings import set_library_settings

if TYPE_CHECKING:
    from flowmill.configs.advantages import AdvantageSection as Advantage
    from flowmill.configs.critic import CriticSection as Critic
    from flowmill.configs.data import DataSection as Data
    from flowmill.configs.errors import FlowmillError
    from flowmill.configs.execution import ExecutionSection as Execution
    from flowmill.configs.model import LoraSection as Lora
    from flowmill.configs.model import ModelSection as Model
    from flowmill.configs.rate import RateSection as Rate
    from flowmill.configs.render import RenderSection as Render
    from flowmill.configs.rewards import RewardSection as Reward
    from flowmill.configs.schema import EvaluateSection as Evaluate
    from flowmill.configs.schema import OptimizeSection as Optimize
    from flowmill.configs.schema import PromptsSection as Prompts
    from flowmill.configs.schema import RolloutSection as Rollout
    from flowmill.configs.schema import TrackingSection as Tracking
    from flowmill.configs.tokens import TokensSection as Tokens
    from flowmill.configs.watch import WatchSection as Watch
    from flowmill.run_starter import start, train
    from flowmill.store_reader import Run, Store, open

__all__ = [
    "Advantage",
    "Critic",
    "Data",
    "Evaluate",
    "Execution",
    "FlowmillError",
    "Lora",
    "Model",
    "Optimize",
    "Prompts",
    "Rate",
    "Render",
    "Reward",
    "Rollout",
    "Run",
    "Store",
    "Tokens",
    "Tracking",
    "Watch",
    "open",
    "start",
    "train",
]

#: Place of each public name. They are imported when asked for, because every module of flowmill imports this one first.
_PLACES = {
    "Advantage": "configs.advantages:AdvantageSection",
    "Critic": "configs.critic:CriticSection",
    "Data": "configs.data:DataSection",
    "Evaluate": "configs.schema:EvaluateSection",
    "Execution": "configs.execution:ExecutionSection",
    "FlowmillError": "configs.errors:FlowmillError",
    "Lora": "configs.model:LoraSection",
    "Model": "configs.model:ModelSection",
    "Optimize": "configs.schema:OptimizeSection",
    "Prompts": "configs.schema:PromptsSection",
    "Rate": "configs.rate:RateSection",
    "Render": "configs.render:RenderSection",
    "Reward": "configs.rewards:RewardSection",
    "Rollout": "configs.schema:RolloutSection",
    "Run": "store_reader:Run",
    "Store": "store_reader:Store",
    "Tokens": "configs.tokens:TokensSection",
    "Tracking": "configs.schema:TrackingSection",
    "Watch": "configs.watch:WatchSection",
    "open": "store_reader:open",
    "start": "run_starter:start",
    "train": "run_starter:train",
}


# Before any of the libraries is imported.
set_library_settings()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flowmill' has no attribute '{name}'")
    module, _, attribute = _PLACES[name].partition(":")
    value = getattr(import_module(f"flowmill.{module}"), attribute)
    if module.startswith("configs.") and attribute.endswith("Section"):
        value = import_module("flowmill.run_starter").maker_of(value, f"flowmill.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
