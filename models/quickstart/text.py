"""Tokenizers of the tiny pipelines: the real classes, trained on a few words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from flowmill.models.policies.dummy_components import TextProcessor

_SENTENCE = (
    "a an the of in on and with two three red green blue yellow cube circle cat dog sign that says photo painting "
    "Describe the image by detailing color shape size texture quantity text spatial relationships objects background "
    "system user assistant You are helpful 0 1 2 3 4 5 6 7 8 9"
)
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_TOKENS = [
    f"<|{name}|>" for name in "endoftext im_start im_end vision_start vision_end image_pad video_pad".split()
]


def byte_pairs(special: list[str], words: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of a byte-pair encoding trained on a few words and on ``words``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1200 if words else 600, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*[_SENTENCE] * 3, *[words] * 3 * bool(words)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    return dict(model["vocab"]), merges


def clip_tokenizer() -> Any:
    """Return a CLIP tokenizer of a few hundred pieces that knows every byte. Words are merged from left to right.
    ``BpeTrainer`` is not used: with a suffix for ends of words its order of pieces changes every time, and equal
    options must give equal models."""
    end = "</w>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(character + end for character in alphabet)]
    merges: dict[tuple[str, str], None] = {}
    for word in dict.fromkeys(_SENTENCE.lower().split()):
        left, *rest = [*word[:-1], word[-1] + end]
        for right in rest:
            merges[left, right] = None
            left += right
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return t.CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=77)


def t5_tokenizer() -> Any:
    """Return a T5 tokenizer of a few hundred pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in sorted(set(_SENTENCE.lower().split()))]
    pieces += [(chr(code), -6.0) for code in range(33, 127)]
    return t.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer(words: str = "") -> Any:
    """Return a Qwen tokenizer of a few hundred pieces, also trained on ``words``, with a chat template."""
    vocabulary, merges = byte_pairs(_QWEN_TOKENS, words)
    tokenizer = t.Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=_QWEN_TOKENS[1:],
        model_max_length=4096,
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def gemma_tokenizer() -> Any:
    """Return a Gemma tokenizer of words and printable characters."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    words = dict.fromkeys(_SENTENCE.lower().split())
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        left = "▁"
        for right in word:
            merges[left, right] = None
            left += right
    pieces = [*special, *(chr(code) for code in range(33, 127)), "\n", *(left + right for left, right in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return t.GemmaTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=4096)


def mistral_tokenizer() -> Any:
    """Return a tokenizer for FLUX.2, with its chat template. Mistral's own processor requires torchvision even for
    text; a tokenizer with a chat template answers the same call."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]
    vocabulary, merges = byte_pairs(special)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    return tokenizer


def _hunyuan_tokenizer() -> Any:
    """Return a Qwen tokenizer that knows the words of HunyuanVideo 1.5's template."""
    from diffusers import HunyuanVideo15Pipeline

    embeds = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
    return qwen_tokenizer(words=embeds.parameters["system_message"].default)


#: Tokenizers of tiny pipelines by their names in ``tiny.yaml``.
TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "clip_tokenizer": clip_tokenizer,
    "t5_tokenizer": t5_tokenizer,
    "qwen_tokenizer": qwen_tokenizer,
    "qwen_processor": lambda: TextProcessor(qwen_tokenizer()),
    "hunyuan_tokenizer": _hunyuan_tokenizer,
    "gemma_tokenizer": gemma_tokenizer,
    "mistral_tokenizer": mistral_tokenizer,
    "byte_tokenizer": t.ByT5Tokenizer,
}
