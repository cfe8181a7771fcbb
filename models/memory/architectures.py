"""Sizes of published models, without their weights: denoisers built on the meta device from their configs.

A local folder has the configs. Those of published models are in ``models/memory/published.yaml``, so that a config can
be checked before a download.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import diffusers_class, read_json
from flowmill.models.memory.published import Architecture, Transformer, of_class, pipelines
from flowmill.models.policies.pipeline_configs import whole
from flowmill.models.policies.pipeline_index import index_file, read_index_file
from flowmill.models.weights.stored_weights import on_meta

if TYPE_CHECKING:
    from torch import nn

#: Names of sizes in a text encoder's config: T5's names, and those of all others.
_TEXT_SIZES = {"width": ("d_model", "hidden_size"), "inner": ("d_ff", "intermediate_size")}
#: Prefixes of components that encode prompts and their images.
_ENCODERS = ("text_encoder", "image_encoder", "connectors")
#: Components that decode sound.
_SOUND = ("audio_vae", "vocoder")
#: Pipelines in which the prompt's source image is appended to the generated tokens, in the generated size.
_IMAGE_TOKENS = ("FluxKontextPipeline",)


def architecture_of(path: str) -> Architecture | None:
    """Return the architecture of a pipeline folder or a published model, None for any other path."""
    folder = user_path(path)
    if not index_file(folder).is_file():
        return pipelines().get(path)
    try:
        with whole(folder):
            return _local(folder)
    except (LookupError, TypeError, AttributeError):
        return None  # a pipeline of another kind


def meta_denoiser(architecture: Architecture) -> nn.Module:
    """Return the denoiser without weights."""
    return on_meta(lambda: diffusers_class(architecture.denoiser)(**architecture.config))


def meta_decoder(architecture: Architecture) -> nn.Module:
    """Return the autoencoder without weights."""
    arguments = dict(architecture.vae)
    kind = diffusers_class(arguments.pop("class"))
    return on_meta(lambda: kind(**arguments))


def decoder_parameters(architecture: Architecture) -> int:
    """Return the number of parameters of all that decodes samples."""
    return parameters(meta_decoder(architecture)) + architecture.sound_parameters


def parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _local(folder: Path) -> Architecture | None:
    index = read_index_file(index_file(folder))
    names = [name for name in ("transformer", "transformer_2", "unet") if index.get(name, [None])[0]]
    vae = folder / "vae" / "config.json"
    if not names or not vae.is_file():
        return None
    config, autoencoder, denoiser = read_json(folder / names[0] / "config.json"), read_json(vae), index[names[0]][1]
    fields: dict[str, Any] = {
        "config": {key: value for key, value in config.items() if not key.startswith("_")},
        "denoisers": len(names),
        "latents": latent_shape(autoencoder),
        "image_tokens": index["_class_name"] in _IMAGE_TOKENS,
        "text_parameters": _stored(folder, [name for name in index if name.startswith(_ENCODERS)]),
        "sound_parameters": _stored(folder, [name for name in index if name in _SOUND]),
        "text": _text_encoder([read_json(path) for path in sorted(folder.glob("text_encoder*/config.json"))]),
        "vae": {
            "class": index["vae"][1],
            **{key: value for key, value in autoencoder.items() if not key.startswith("_")},
        },
    }
    return Architecture(denoiser=denoiser, **{**of_class(denoiser, config), **fields})


def _text_encoder(configs: Sequence[Mapping[str, Any]]) -> Transformer:
    candidates = []
    for config in configs:
        fields = config.get("text_config") or config
        sizes = {name: next((fields[key] for key in keys if key in fields), 0) for name, keys in _TEXT_SIZES.items()}
        # T5 materializes attention scores; language models keep the outputs of all layers.
        more = (
            {"heads": fields["num_heads"]} if "d_model" in fields else {"retained": fields.get("num_hidden_layers", 0)}
        )
        tables = 1 if fields.get("tie_word_embeddings", True) else 2
        candidates.append(Transformer(**sizes, **more, embedded=tables * fields.get("vocab_size", 0) * sizes["width"]))
    return max(candidates, key=lambda encoder: encoder.width * encoder.inner, default=Transformer(width=0, inner=0))


def _stored(folder: Path, components: Sequence[str]) -> int:
    return sum(sum(stored_numbers(folder / name).values()) for name in components)


def stored_numbers(folder: Path) -> dict[str, int]:
    """Return the number of elements of each tensor in the safetensors files of a component, from their headers."""
    numbers: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                numbers |= {key: math.prod(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"'{file}' is no safetensors file ({error})") from None
    return numbers


def latent_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return latent channels, and pixels per side and frames of a latent, from an autoencoder's config."""
    if "z_dim" in config:
        halvings = config.get("temperal_downsample", (False, True, True))
        patch = config.get("patch_size") or 1
        return config["z_dim"], patch * 2 ** len(halvings), 2 ** sum(halvings)
    if "spatial_compression_ratio" in config:
        return config["latent_channels"], config["spatial_compression_ratio"], config["temporal_compression_ratio"]
    levels = config.get("block_out_channels") or config["encoder_block_out_channels"]
    return config["latent_channels"], 2 ** (len(levels) - 1), int(config.get("temporal_compression_ratio", 1))
