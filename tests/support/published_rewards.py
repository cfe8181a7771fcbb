"""Small random copies of reward models as they are published: the names of other libraries, a detector of COCO."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipVisionConfig,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLModel,
    SwinConfig,
)
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel


def write_open_clip(folder: Path, file: Path) -> CLIPModel:
    """Write another CLIP model of the sizes of the one in a folder, with open_clip's names; return it."""
    torch.manual_seed(7)
    model = CLIPModel(CLIPModel.from_pretrained(folder).config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    stored: dict[str, Tensor] = {"logit_scale": model.logit_scale}
    for outer, tower in (("visual.", model.vision_model), ("", model.text_model)):
        inner = tower.embeddings
        stored[f"{outer}positional_embedding"] = inner.position_embedding.weight
        for number, layer in enumerate(tower.encoder.layers):
            block, attention = f"{outer}transformer.resblocks.{number}", layer.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            stored[f"{block}.attn.in_proj_weight"] = torch.cat([part.weight for part in parts])
            stored[f"{block}.attn.in_proj_bias"] = torch.cat([part.bias for part in parts])
            for name, part in (
                ("attn.out_proj", attention.out_proj),
                ("ln_1", layer.layer_norm1),
                ("ln_2", layer.layer_norm2),
                ("mlp.c_fc", layer.mlp.fc1),
                ("mlp.c_proj", layer.mlp.fc2),
            ):
                stored |= {f"{block}.{name}.weight": part.weight, f"{block}.{name}.bias": part.bias}
    for name, part in (
        ("visual.ln_pre", model.vision_model.pre_layrnorm),
        ("visual.ln_post", model.vision_model.post_layernorm),
        ("ln_final", model.text_model.final_layer_norm),
    ):
        stored |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    stored["visual.class_embedding"] = model.vision_model.embeddings.class_embedding
    stored["visual.conv1.weight"] = model.vision_model.embeddings.patch_embedding.weight
    stored["token_embedding.weight"] = model.text_model.embeddings.token_embedding.weight
    stored["visual.proj"] = model.visual_projection.weight.T
    stored["text_projection"] = model.text_projection.weight.T
    _save(stored, file)
    return model


def write_image_reward(folder: Path) -> tuple[BlipVisionModel, BlipTextModel, dict[str, Tensor]]:
    """Write weights with ImageReward's names and a tokenizer; return the encoders and the head's layers."""
    torch.manual_seed(8)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", ",", "two", "dog", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 1}
    vision = BlipVisionModel(
        BlipVisionConfig(**common, image_size=32, patch_size=8, layer_norm_eps=1e-6, hidden_act="gelu")
    )
    text = BlipTextModel(
        BlipTextConfig(
            **{**common, "num_attention_heads": 2, "hidden_size": 128},
            vocab_size=len(words),
            encoder_hidden_size=64,
            max_position_embeddings=40,
        ),
        add_pooling_layer=False,
    )
    head: dict[str, Tensor] = {}
    for place, inputs, outputs in ((0, 128, 1024), (2, 1024, 128), (4, 128, 64), (6, 64, 16), (7, 16, 1)):
        layer = nn.Linear(inputs, outputs)
        head |= {f"layers.{place}.weight": layer.weight.detach(), f"layers.{place}.bias": layer.bias.detach()}
    stored = {f"mlp.{name}": tensor for name, tensor in head.items()}
    stored |= {f"blip.text_encoder.{name}": tensor for name, tensor in text.state_dict().items()}
    stored["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    stored["blip.vision_proj.weight"] = torch.zeros(2, 2)
    names = {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding": "pos_embed",
        "embeddings.patch_embedding.weight": "patch_embed.proj.weight",
        "embeddings.patch_embedding.bias": "patch_embed.proj.bias",
        "post_layernorm.weight": "norm.weight",
        "post_layernorm.bias": "norm.bias",
    }
    for name, tensor in vision.state_dict().items():
        plain = names.get(name, name.replace("encoder.layers", "blocks").replace("layer_norm", "norm"))
        plain = plain.replace("self_attn.projection", "attn.proj").replace("self_attn.qkv", "attn.qkv")
        stored[f"blip.visual_encoder.{plain}"] = tensor
    _save(stored, folder / "ImageReward.safetensors")
    return vision.eval(), text.eval(), head


def write_detector(folder: Path, classes: int = 80) -> str:
    """Write an instance segmentation model that knows as many classes."""
    torch.manual_seed(9)
    backbone = SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=5,
        id2label={number: f"class {number}" for number in range(classes)},
    )  # fmt: skip
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Mask2FormerImageProcessor", "size": {"height": 64, "width": 64}, "do_resize": true}'
    )
    return str(folder)


def write_hpsv3(folder: Path) -> tuple[Qwen2VLModel, nn.Sequential]:
    """Write a Qwen2-VL of a few layers, HPSv3's weights for it with their old names, and an instruction."""
    model = _write_qwen2_vl(folder, own_tokens=1)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    head = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    stored = {f"rm_head.{name}": tensor for name, tensor in head.state_dict().items()}
    stored["lm_head.weight"] = torch.zeros(2, 2)
    stored |= _as_once_named(model)
    _save(stored, folder / "HPSv3.safetensors")
    (folder / "instruction.txt").write_text("Is it good? {text_prompt}\n<|Reward|>\n")
    return model, head.eval()


def write_video_align(folder: Path) -> tuple[Qwen2VLModel, Tensor]:
    """Write a Qwen2-VL of a few layers, weights for it as VideoReward's are named by peft, its settings and question.

    Returns:
        The model with the adapters merged, and the head, (3, 32).
    """
    model = _write_qwen2_vl(folder, own_tokens=3)
    stored = {f"base_model.model.{name}": tensor for name, tensor in _as_once_named(model).items()}
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    stored[f"{layer}.base_layer.weight"] = stored.pop(f"{layer}.weight")
    stored[f"{layer}.base_layer.bias"] = stored.pop(f"{layer}.bias")
    up, down = torch.randn(32, 2), torch.randn(2, 32)
    stored[f"{layer}.lora_A.default.weight"], stored[f"{layer}.lora_B.default.weight"] = down, up
    head = torch.randn(3, 32)
    stored["base_model.model.rm_head.weight"] = head
    _save(stored, folder / "VideoReward.safetensors")
    model.language_model.layers[0].self_attn.q_proj.weight.data += 2.0 * up @ down
    (folder / "model_config.json").write_text(
        '{"data_config": {"fps": 2, "max_frame_pixels": 200704, "num_frames": null, "sample_type": "uniform"},'
        ' "peft_lora_config": {"lora_r": 2, "lora_alpha": 4, "use_rslora": false}, "inference_config": {"VQ_mean": 1.0,'
        ' "VQ_std": 2.0, "MQ_mean": 0.5, "MQ_std": 0.25, "TA_mean": -1.0, "TA_std": 3.0}}'
    )
    (folder / "question.txt").write_text("Look: <|VQ_reward|>, <|MQ_reward|>, {text_prompt} <|TA_reward|>.")
    return model, head


def _write_qwen2_vl(folder: Path, *, own_tokens: int) -> Qwen2VLModel:
    """Write sizes and tokenizer of a Qwen2-VL; return one whose words are more by tokens of its own."""
    torch.manual_seed(10)
    words = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"]
    pads = ["<|image_pad|>", "<|video_pad|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bytes_tokenizer(), pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*words, *pads]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}"
        "{{ c.text }}{% else %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    tokenizer.save_pretrained(folder)
    image, video = tokenizer.convert_tokens_to_ids(pads)
    text = {
        "vocab_size": len(tokenizer) + own_tokens, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=video)
    config.save_pretrained(folder)
    return Qwen2VLModel(config).eval()


def _as_once_named(model: Qwen2VLModel) -> dict[str, Tensor]:
    return {name.replace("language_model.", "model.", 1): tensor for name, tensor in model.state_dict().items()}


def _bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def _save(stored: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in stored.items()}, file)


def write_dina(folder: Path, pipeline: Path) -> dict[str, str]:
    """Write adapters for the first blocks of an SD3 pipeline and a head, as they are published; return the options."""
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    from flowmill.models.rewards.dina_lrm import RewardHead

    transformer = SD3Transformer2DModel.from_pretrained(pipeline / "transformer")
    transformer.transformer_blocks = transformer.transformer_blocks[:1]
    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_q", "add_k_proj"])
    adapted = get_peft_model(transformer, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "backbone_lora")
    head = RewardHead(width=transformer.inner_dim, taps=1)
    save_file(head.state_dict(), folder / "head.safetensors")
    return {"adapter": str(folder / "backbone_lora"), "head": str(folder / "head.safetensors"), "model": str(pipeline)}
