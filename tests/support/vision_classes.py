"""Tiny random vision-language models of several classes of transformers, with their processors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.language_models import drawn_texts_data, two_epochs

_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"]
_CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
#: Further tokens of each class, by attribute of the tokenizer.
_TOKENS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _QWEN),
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "smolvlm": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
}
#: The mark of an image in the text of a chat.
_MARK = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>\n",
}
CLASSES = tuple(_TOKENS)
_TEMPLATE = (
    "<bos>{{% for m in messages %}}<|{{{{ m['role'] }}}}|>{{% if m['content'] is string %}}{{{{ m['content'] }}}}"
    "{{% else %}}{{% for c in m['content'] %}}{{% if c['type'] == 'image' %}}{mark}{{% else %}}{{{{ c['text'] }}}}"
    "{{% endif %}}{{% endfor %}}{{% endif %}}<eos>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
_TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def tokenizer_of(kind: str) -> Any:
    """Return a tokenizer of characters with the tokens of a class."""
    extra = _TOKENS[kind]
    rows = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)] if kind == "smolvlm" else []
    special = [*_SPECIAL, *extra.values(), *rows]
    vocabulary = {token: number for number, token in enumerate([*special, *_CHARACTERS])}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", *rows],
        extra_special_tokens=dict(extra),
        clean_up_tokenization_spaces=False,
    )


def _qwen(kind: str, ids: Mapping[str, int]) -> tuple[Any, Any]:
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32}
    text = {**_TEXT, "vocab_size": ids["size"], "rope_parameters": dict(_ROPE)}
    if kind == "qwen2_vl":
        vision = {"depth": 2, "num_heads": 2, "patch_size": 8, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        vision |= {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 32}
    else:
        vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    names = {"image_token_id": "image_token", "video_token_id": "video_token"}
    tokens = {name: ids[_QWEN[token]] for name, token in names.items()}
    starts = {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
    made = {"qwen2_vl": t.Qwen2VLConfig, "qwen2_5_vl": t.Qwen2_5_VLConfig, "qwen3_vl": t.Qwen3VLConfig}[kind]
    size = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
    images = t.Qwen2VLImageProcessorPil(patch_size=8, size=size)
    return made(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens, **starts), images


def _gemma3(ids: Mapping[str, int]) -> tuple[Any, Any]:
    text = {**_TEXT, "vocab_size": ids["size"], "sliding_window": 16, "query_pre_attn_scalar": 8}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = t.Gemma3Config(
        text_config=text,
        vision_config={**_SIGLIP, "image_size": 32},
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        eos_token_id=2,
    )
    return config, t.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})


def _smolvlm(ids: Mapping[str, int]) -> tuple[Any, Any]:
    config = t.SmolVLMConfig(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": ids["size"]},
        vision_config={**_SIGLIP, "image_size": 32, "model_type": "smolvlm_vision"},
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    images = t.SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    return config, images


def _internvl(ids: Mapping[str, int]) -> tuple[Any, Any]:
    config = t.InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen2", "vocab_size": ids["size"]},
        vision_config={**_SIGLIP, "image_size": [32, 32], "patch_size": [8, 8], "num_channels": 3},
        image_token_id=ids["<IMG_CONTEXT>"],
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    images = t.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=3)
    return config, images


def write_vision_model(folder: Path, kind: str = "qwen2_vl", *, seed: int = 0) -> None:
    """Write a random model with its tokenizer and processor."""
    tokenizer = tokenizer_of(kind)
    ids = {**tokenizer.get_vocab(), "size": len(tokenizer)}
    made = {"gemma3": _gemma3, "smolvlm": _smolvlm, "internvl": _internvl}
    config, images = made[kind](ids) if kind in made else _qwen(kind, ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = t.AutoModelForImageTextToText.from_config(config).eval()
        for name, parameter in model.named_parameters():
            # With the default scale all tokens are about equally likely.
            if parameter.dim() >= 2 and "embed" not in name:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.format(mark=_MARK[kind]))
    numbers = {"gemma3": {"image_seq_length": 4}, "smolvlm": {"image_seq_len": 4}, "internvl": {"image_seq_length": 4}}
    (folder / "processor_config.json").write_text(json.dumps(numbers.get(kind, {})))


def vision_data(folder: Path, kind: str = "qwen2_vl", **rollout: Any) -> dict[str, Any]:
    """Return a config of two epochs of texts about images, with base model, images and prompts in a folder."""
    write_vision_model(folder / "vlm", kind)
    rng = np.random.default_rng(0)
    for number, size in enumerate([(40, 24), (17, 60), (32, 32), (33, 20), (24, 40)]):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    rows = [{"prompt": "Which?", "image": [f"{n}.png", f"{m}.png"]} for n in range(5) for m in range(n)]
    rows += [{"prompt": "What?", "image": f"{n}.png", "answer": str(n)} for n in range(5)]
    for name, part in (("train", rows[:12]), ("heldout", rows[12:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = two_epochs(folder, "vision", {"policy": "vision_lm", "path": str(folder / "vlm")}, **rollout)
    data["prompts"]["image"] = "image"
    return {**data, "evaluate": {**data["evaluate"], "samples": 3}}


def drawn_vision_data(folder: Path, base: Path, kind: str = "qwen2_vl") -> dict[str, Any]:
    """Return a config of texts in up to three turns by a model that sees its images, and no comments.

    Args:
        folder: of the model, prompts and store.
        base: the pipeline of the image model.
        kind: the class of the model.
    """
    data = drawn_texts_data(folder, base)
    write_vision_model(folder / "vlm", kind)
    data["model"] = {"policy": "vision_lm", "path": str(folder / "vlm")}
    data["render"]["turns"] = {"count": 3, "comment": "", "done": "7", "cost": 0.1, "sees": "images"}
    return data
