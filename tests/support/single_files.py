"""Single files as models' authors write them, of diffusers' own modules: the way back of its converters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = Mapping[str, Tensor]


def single_file(tensors: Tensors, path: Path) -> Path:
    """Write a file."""
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


def before(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors whose names begin with what says which component they are of."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def stable_diffusion(pipeline: Any) -> dict[str, Tensor]:
    """Return a Stable Diffusion 1 in the layout of CompVis, with what a training run of theirs leaves in it."""
    text = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in state(pipeline.text_encoder).items()}
    return {
        **before("model.diffusion_model.", ldm_unet(state(pipeline.unet))),
        **before("first_stage_model.", ldm_vae(state(pipeline.vae))),
        **before("cond_stage_model.transformer.", text),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
        **dict.fromkeys(("betas", "alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "model_ema.decay"), torch.ones(3)),
    }


def stable_diffusion_xl(pipeline: Any) -> dict[str, Tensor]:
    """Return a Stable Diffusion XL in the layout of Stability, whose second text encoder is open_clip's."""
    first = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in state(pipeline.text_encoder).items()}
    return {
        **before("model.diffusion_model.", ldm_unet(state(pipeline.unet), deep=True)),
        **before("first_stage_model.", ldm_vae(state(pipeline.vae))),
        **before("conditioner.embedders.0.transformer.", first),
        **before("conditioner.embedders.1.model.", open_clip(state(pipeline.text_encoder_2))),
        "denoiser.sigmas": torch.ones(1000),
    }


def stable_diffusion_3(pipeline: Any) -> dict[str, Tensor]:
    """Return a Stable Diffusion 3 with all text encoders in the layout of Stability."""
    encoders = {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}
    found: dict[str, Tensor] = {}
    for name, component in encoders.items():
        tensors = {
            key: tensor
            for key, tensor in state(getattr(pipeline, component)).items()
            # A CLIP-L whose pooled text is not projected, and the embedding twice in a T5.
            if key != "encoder.embed_tokens.weight" and (name, key) != ("clip_l", "text_projection.weight")
        }
        found |= before(f"text_encoders.{name}.transformer.", tensors)
    found |= before("model.diffusion_model.", sd3_transformer(state(pipeline.transformer)))
    return {**found, **before("first_stage_model.", ldm_vae(state(pipeline.vae)))}


def state(module: Any) -> dict[str, Tensor]:
    """Return a module's tensors."""
    return dict(module.state_dict())


def ldm_unet(tensors: Tensors, *, deep: bool = False) -> dict[str, Tensor]:
    """Return a UNet of two levels with one layer each by CompVis' names; attention is ``deep`` in the second alone."""
    blocks = {
        r"time_embedding\.linear_1": "time_embed.0",
        r"time_embedding\.linear_2": "time_embed.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        r"down_blocks\.0\.resnets\.0": "input_blocks.1.0",
        r"add_embedding\.linear_1": "label_emb.0.0",
        r"add_embedding\.linear_2": "label_emb.0.2",
        r"down_blocks\.0\.attentions\.0": "input_blocks.1.1",
        r"down_blocks\.0\.downsamplers\.0\.conv": "input_blocks.2.0.op",
        r"down_blocks\.1\.resnets\.0": "input_blocks.3.0",
        r"down_blocks\.1\.attentions\.0": "input_blocks.3.1",
        r"mid_block\.resnets\.0": "middle_block.0",
        r"mid_block\.attentions\.0": "middle_block.1",
        r"mid_block\.resnets\.1": "middle_block.2",
        r"up_blocks\.0\.resnets\.0": "output_blocks.0.0",
        r"up_blocks\.0\.resnets\.1": "output_blocks.1.0",
        r"up_blocks\.0\.attentions\.0": "output_blocks.0.1",
        r"up_blocks\.0\.attentions\.1": "output_blocks.1.1",
        r"up_blocks\.0\.upsamplers\.0\.conv": f"output_blocks.1.{2 if deep else 1}.conv",
        r"up_blocks\.1\.resnets\.0": "output_blocks.2.0",
        r"up_blocks\.1\.attentions\.0": "output_blocks.2.1",
        r"up_blocks\.1\.resnets\.1": "output_blocks.3.0",
        r"up_blocks\.1\.attentions\.1": "output_blocks.3.1",
    }
    layers = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "time_emb_proj": "emb_layers.1",
        "conv_shortcut": "skip_connection",
    }
    # Transformer blocks have a norm1 and a norm2 of their own, which are called so in both.
    inside = {
        rf"^((?:in|out)put_blocks\.\d+\.0|middle_block\.[02])\.{ours}\.": rf"\1.{theirs}."
        for ours, theirs in layers.items()
    }
    return _renamed(tensors, [{rf"^{ours}\.": f"{theirs}." for ours, theirs in blocks.items()}, inside])


def ldm_vae(tensors: Tensors) -> dict[str, Tensor]:
    """Return an image autoencoder of four levels by CompVis' names; attention's projections are convolutions there."""
    names = {
        r"conv_norm_out\.": "norm_out.",
        r"\.down_blocks\.(\d)\.resnets\.": r".down.\1.block.",
        r"\.down_blocks\.(\d)\.downsamplers\.0\.": r".down.\1.downsample.",
        r"\.mid_block\.resnets\.0\.": ".mid.block_1.",
        r"\.mid_block\.resnets\.1\.": ".mid.block_2.",
        r"\.mid_block\.attentions\.0\.": ".mid.attn_1.",
        r"conv_shortcut": "nin_shortcut",
        r"attn_1\.group_norm": "attn_1.norm",
        r"attn_1\.to_([qkv])": r"attn_1.\1",
        r"attn_1\.to_out\.0": "attn_1.proj_out",
        **{rf"\.up_blocks\.{level}\.resnets\.": f".up.{3 - level}.block." for level in range(4)},
        **{rf"\.up_blocks\.{level}\.upsamplers\.0\.": f".up.{3 - level}.upsample." for level in range(4)},
    }
    found = _renamed(tensors, [{ours: theirs} for ours, theirs in names.items()])
    return {
        name: tensor[:, :, None, None] if re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name) else tensor
        for name, tensor in found.items()
    }


def sd3_transformer(tensors: Tensors) -> dict[str, Tensor]:
    """Return a transformer of Stable Diffusion 3 by Stability's names."""
    layers = max(int(name.split(".")[1]) for name in tensors if name.startswith("transformer_blocks.")) + 1
    names = {
        r"^pos_embed\.pos_embed": "pos_embed",
        r"^pos_embed\.proj": "x_embedder.proj",
        r"^time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
        r"^time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
        r"^time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
        r"^time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
        r"^proj_out": "final_layer.linear",
        r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
        r"^transformer_blocks": "joint_blocks",
        r"attn\.norm_added_([qk])\.": r"context_block.attn.ln_\1.",
        r"(attn2?)\.norm_([qk])\.": r"x_block.\1.ln_\2.",
        r"(attn2?)\.to_out\.0": r"x_block.\1.proj",
        r"attn\.to_add_out": "context_block.attn.proj",
        r"norm1\.linear": "x_block.adaLN_modulation.1",
        r"norm1_context\.linear": "context_block.adaLN_modulation.1",
        r"ff\.net\.0\.proj": "x_block.mlp.fc1",
        r"ff\.net\.2": "x_block.mlp.fc2",
        r"ff_context\.net\.0\.proj": "context_block.mlp.fc1",
        r"ff_context\.net\.2": "context_block.mlp.fc2",
    }
    fused = {
        f"joint_blocks.{n}.{block}.qkv": [f"transformer_blocks.{n}.{attention}{side}" for side in sides]
        for n in range(layers)
        for block, attention, sides in (
            ("x_block.attn", "attn.", ("to_q", "to_k", "to_v")),
            ("context_block.attn", "attn.", ("add_q_proj", "add_k_proj", "add_v_proj")),
            ("x_block.attn2", "attn2.", ("to_q", "to_k", "to_v")),
        )
    }
    swapped = ("final_layer.", f"joint_blocks.{layers - 1}.context_block.adaLN_modulation.")
    return _fused(tensors, names, fused, swapped)


def _fused(
    tensors: Tensors, names: Mapping[str, str], fused: Mapping[str, list[str]], swapped: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return tensors renamed, several as one, and of shift and scale the other first."""
    found, used = {}, set()
    for theirs, ours in fused.items():
        for kind in ("weight", "bias"):
            parts = [f"{name}.{kind}" for name in ours]
            if parts[0] in tensors:
                found[f"{theirs}.{kind}"] = torch.cat([tensors[name] for name in parts])
                used |= set(parts)
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    found |= _renamed(rest, [{ours: theirs} for ours, theirs in names.items()])
    return {
        name: torch.cat(tensor.chunk(2)[::-1]) if name.startswith(swapped) and "linear" not in name else tensor
        for name, tensor in found.items()
    }


def _renamed(tensors: Tensors, steps: Iterable[Mapping[str, str]]) -> dict[str, Tensor]:
    """Return tensors by other names: of each step the first pattern that is found is replaced."""
    found = {}
    for name, tensor in tensors.items():
        for step in steps:
            for pattern, theirs in step.items():
                changed = re.sub(pattern, theirs, name)
                if changed != name:
                    name = changed
                    break
        found[name] = tensor
    return found


def open_clip(tensors: Tensors) -> dict[str, Tensor]:
    """Return a text encoder of CLIP by open_clip's names."""
    plain = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    layers = max(int(name.split(".")[2]) for name in plain if name.startswith("encoder.layers.")) + 1
    names = {
        r"^embeddings\.position_embedding\.weight": "positional_embedding",
        r"^embeddings\.token_embedding": "token_embedding",
        r"^final_layer_norm": "ln_final",
        r"^text_projection\.weight": "text_projection",
        r"^encoder\.layers": "transformer.resblocks",
        r"layer_norm([12])": r"ln_\1",
        r"mlp\.fc1": "mlp.c_fc",
        r"mlp\.fc2": "mlp.c_proj",
        r"self_attn\.out_proj": "attn.out_proj",
    }
    fused = {
        f"transformer.resblocks.{n}.attn.in_proj": [f"encoder.layers.{n}.self_attn.{side}_proj" for side in "qkv"]
        for n in range(layers)
    }
    found = _fused(plain, names, fused, swapped=("no such name",))
    found = {re.sub(r"in_proj\.(weight|bias)", r"in_proj_\1", name): tensor for name, tensor in found.items()}
    return {**found, "text_projection": found["text_projection"].T, "logit_scale": torch.ones(())}
