"""Memory of the image model that renders a run's texts."""

from __future__ import annotations

from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.renderer import renderer_config
from flowmill.tasks.modalities.memory import DrawingMemory
from flowmill.tasks.modalities.modality import make_kind


def drawing_of(config: RunConfig) -> tuple[DrawingMemory | None, tuple[str, ...]]:
    """Return the renderer's memory on this device, and notes on it."""
    if config.render is None:
        return None, ()
    drawer, model = renderer_config(config), config.render.model
    memory = make_kind(drawer).drawing_memory(drawer)
    if memory is None:
        return None, (f"memory: render.model '{model.path or model.policy}' is not counted, because it is unknown.",)
    if config.execution.render_device is None:
        return memory, ()
    together = (memory.weights + memory.work) / 1e9
    return None, (f"memory: the image model takes {together:.1f} GB of execution.render_device.",)
