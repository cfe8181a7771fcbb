"""Out-of-memory errors, and what needs less memory, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flowmill.configs.errors import OutOfMemoryError

#: Errors of torch and of Python, by name so that torch need not be imported here.
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")
_SAMPLING = (
    "Lower execution.rollout_batch_size, of texts also rollout.tokens.max_new, of images model.height and model.width. "
    "Weights take less with model.quantize, and on several ranks with execution.strategy=fsdp and "
    "execution.sampling=spread."
)
_DECODING = "Lower execution.decode_batch_size, or set model.vae_tiling=true."
_RENDERING = (
    "Lower execution.render_rows, or execution.decode_batch_size if it failed while decoding, or set "
    "render.model.quantize."
)
#: What to change, by phase of the estimate of ``flowmill check`` and by stage.
REMEDIES: Mapping[str, str] = {
    "encode": "Lower execution.encode_batch_size, or set model.quantize={text_encoders: int8}.",
    "ingest": _DECODING,
    "rollout": f"{_SAMPLING} {_DECODING}",
    "evaluate": f"{_SAMPLING} {_DECODING}",
    "decode": _DECODING,
    "re-score": "Lower execution.micro_batch_size or rollout.tokens.max_new.",
    "render": _RENDERING,
    "depict": _RENDERING,
    "score": (
        "Lower rewards[].batch_size, give the models a device of their own (rewards[].device), or let a server "
        "elsewhere score ('flowmill serve-reward', rewards[].server)."
    ),
    "value": "Lower execution.micro_batch_size, or set critic.backbone to 'policy'.",
    "gradient": "Lower execution.decode_batch_size or rewards[].batch_size, or set model.vae_tiling=true.",
    "optimize": (
        "Lower execution.micro_batch_size, or execution.decode_batch_size where rewards are called while training. Set "
        "model.gradient_checkpointing=true, train adapters (model.lora), or set model.quantize. On several ranks set "
        "execution.strategy=fsdp and execution.offload."
    ),
    "validate": "Lower execution.micro_batch_size.",
}


@contextmanager
def enough_memory(task: str, remedy: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Raise an error with remedies where a device has too little memory.

    Args:
        task: the work inside.
        remedy: possible changes, in sentences.
        advice: returns a further remedy, based on the memory in use at that time.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if type(error).__name__ not in _NO_MEMORY:
            raise
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(
            f"{task}: {' '.join(filter(None, [message, remedy, advice()]))} 'flowmill check' estimates memory."
        ) from error
