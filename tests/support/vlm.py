"""A small random LLaVA, with a tokenizer of words and a chat template, as vision language models are published."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

WORDS = [
    "USER",
    ":",
    "ASSISTANT",
    "How",
    "would",
    "you",
    "rate",
    "the",
    "quality",
    "of",
    "this",
    "image",
    "?",
    "The",
    "is",
    "excellent",
    "good",
    "fair",
    "poor",
    "bad",
]
_TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}ASSISTANT:"
)


def write_vlm(folder: Path, words: list[str] = WORDS) -> LlavaForConditionalGeneration:
    """Write model and processor that know these words; return the model."""
    torch.manual_seed(11)
    names = {word: number for number, word in enumerate(["<pad>", "<unk>", "<image>", *dict.fromkeys(words)])}
    made = Tokenizer(WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={**sizes, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
            text_config={**sizes, "model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 2},
            image_token_index=names["<image>"],
        )
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    edges = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    LlavaProcessor(
        image_processor=CLIPImageProcessor(**edges),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return model.eval()
