"""Tiny real pipelines of every model family, with random weights: the real classes and latent geometry, small widths.

They are for trying a config end to end, and for tests; they generate noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers as d
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

from configs.errors import ConfigError
from configs.suggestions import did_you_mean
from models.quickstart.cogvideox import cogvideox
from models.quickstart.flux3 import Flux3
from models.quickstart.hunyuan import hunyuan_video15
from models.quickstart.ltx2 import ltx2
from models.quickstart.minimax_h3 import MiniMaxH3
from models.quickstart.parts import (
    flow_scheduler,
    flux2_transformer,
    flux2_vae,
    kl_vae,
    shifting_scheduler,
)
from models.quickstart.qwen import EditPipeline, QwenImage21, qwen_image
from models.quickstart.sana import sana, sana_video
from models.quickstart.text import (
    byte_pairs,
    clip_encoder,
    clip_tokenizer,
    language,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)
from models.quickstart.wan import wan, wan_image_to_video, wan_ti2v, wan_video_to_video


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyBuilder:
    """A random pipeline of one family."""

    family: str = "sd3"
    """Model family, as in ``model.policy``."""
    seed: int = 0
    """Seed of the weights."""

    latents: ClassVar[None] = None
    """Latent sizes differ by family."""

    def build(self, folder: Path, report: Callable[[str, int, int], None]) -> None:
        """Write a diffusers folder."""
        report("tiny pipeline", 0, 1)
        build_tiny(self.family, self.seed).save_pretrained(folder)
        report("tiny pipeline", 1, 1)


def build_tiny(family: str, seed: int = 0) -> Any:
    """Return the tiny pipeline of a family; equal seeds give equal weights.

    Raises:
        ConfigError: there is no such family.
    """
    if family not in _FAMILIES:
        raise ConfigError(f"model.build: there is no tiny pipeline of '{family}'. {did_you_mean(family, _FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _FAMILIES[family]()


def _sd15() -> Any:
    tokenizer = clip_tokenizer()
    unet = d.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    scheduler = d.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return d.StableDiffusionPipeline(
        vae=kl_vae(4, 0.18215, None, quantized=True),
        text_encoder=clip_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl() -> Any:
    tokenizer = clip_tokenizer()
    # Two encoders of width 32, concatenated; pooled text, and eight numbers for each of the six sizes.
    unet = d.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
    )
    # The published config; this class ignores some of its fields.
    scheduler = d.EulerDiscreteScheduler.from_config(
        {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
            "timestep_spacing": "leading",
        }
    )
    return d.StableDiffusionXLPipeline(
        vae=kl_vae(4, 0.13025, None, quantized=True),
        text_encoder=clip_encoder(tokenizer),
        text_encoder_2=clip_encoder(tokenizer, projection=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=scheduler,
        add_watermarker=False,
    )


def _sd3() -> Any:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = d.SD3Transformer2DModel(
        sample_size=8,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return d.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=flow_scheduler(shift=3.0),
        vae=kl_vae(16, 1.5305, 0.0609),
        text_encoder=clip_encoder(clip, projection=True),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip, projection=True),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5, 64),
        tokenizer_3=t5,
    )


def _flux1() -> Any:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = d.FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return d.FluxPipeline(
        transformer=transformer,
        vae=kl_vae(16, 0.3611, 0.1159),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5, 64),
        tokenizer_2=t5,
        scheduler=shifting_scheduler(max_shift=1.15),
    )


def _flux2() -> Any:
    special = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]
    vocabulary, merges = byte_pairs(special)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Mistral's own processor wants torchvision even for text; a tokenizer with a chat template answers the same call.
    tokenizer = t.TokenizersBackend(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=special[4:],
        padding_side="left",
        model_max_length=4096,
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT]"
        "{{ m['content'][0]['text'] }}[/SYSTEM_PROMPT]{% else %}[INST]"
        "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}[/INST]{% endif %}"
        "{% endfor %}"
    )
    # The pipeline reads hidden states 10, 20 and 30, so the depth cannot shrink.
    text = t.MistralConfig(**language(tokenizer, layers=31), bos_token_id=1, eos_token_id=2, pad_token_id=3)
    vision = t.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        image_size=32,
        patch_size=4,
    )
    config = t.Mistral3Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return d.Flux2Pipeline(
        scheduler=flow_scheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=t.Mistral3ForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=flux2_transformer(guidance=True),
    )


def _flux2_klein() -> Any:
    tokenizer = qwen_tokenizer()
    # Hidden states 9, 18 and 27.
    config = t.Qwen3Config(
        **language(tokenizer, layers=28), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return d.Flux2KleinPipeline(
        scheduler=flow_scheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=t.Qwen3ForCausalLM(config).eval(),
        tokenizer=tokenizer,
        transformer=flux2_transformer(guidance=False),
        is_distilled=False,
    )


def _kontext() -> Any:
    unused = ("image_encoder", "feature_extractor")
    parts = {name: part for name, part in _flux1().components.items() if name not in unused}
    return d.FluxKontextPipeline(**parts)


def _z_image() -> Any:
    tokenizer = qwen_tokenizer()
    config = t.Qwen3Config(
        **language(tokenizer, layers=3), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    transformer = d.ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    return d.ZImagePipeline(
        scheduler=flow_scheduler(shift=3.0),
        vae=kl_vae(16, 0.3611, 0.1159),
        text_encoder=t.Qwen3Model(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


_FAMILIES: dict[str, Callable[[], Any]] = {
    "sd15": _sd15,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux1": _flux1,
    "flux2": _flux2,
    "flux2_klein": _flux2_klein,
    "flux3": Flux3,
    "qwen_image": qwen_image,
    "qwen_image_edit": EditPipeline,
    "qwen_image_edit_plus": lambda: EditPipeline("QwenImageEditPlusPipeline", zero_condition=True),
    "qwen_image21": QwenImage21,
    "wan21": wan,
    "wan22": lambda: wan(two=True),
    "wan21_v2v": wan_video_to_video,
    "wan22_ti2v": wan_ti2v,
    "wan22_ti2v_i2v": lambda: wan_ti2v(image=True),
    "flux1_kontext": _kontext,
    "wan21_i2v": lambda: wan_image_to_video(two=False),
    "wan22_i2v": lambda: wan_image_to_video(two=True),
    "z_image": _z_image,
    "sana": sana,
    "sana_video": sana_video,
    "hunyuan_video15": hunyuan_video15,
    "cogvideox": cogvideox,
    "ltx2": ltx2,
    "minimax_h3": MiniMaxH3,
}
