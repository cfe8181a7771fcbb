"""Sequence classifiers for tests: small, random, written as the hub's are."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_TEXT = "a sign that says good bad sad happy days are here user assistant"
_WORDS = [*_SPECIAL, *_TEXT.split()]
_LAYERS = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
_CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} [SEP] {% endfor %}"


def write_sentiment(folder: Path) -> str:
    """Write a BERT of two classes, whose tokenizer pads."""
    tokenizer = _tokenizer(pad_token="[PAD]")
    torch.manual_seed(0)
    config = BertConfig(
        **_LAYERS, vocab_size=len(_WORDS), max_position_embeddings=24, id2label={0: "NEGATIVE", 1: "POSITIVE"}
    )
    # A head starts at almost nothing: scores could not be distinguished.
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=10)
    return _save(folder, model, tokenizer)


def write_preference(folder: Path) -> str:
    """Write a Llama of one label, a reward model, which cannot pad and has a chat template."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = _CHAT
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(
        LlamaConfig(**_LAYERS, vocab_size=len(_WORDS), max_position_embeddings=24, num_labels=1, pad_token_id=None)
    )
    torch.nn.init.normal_(model.score.weight)
    return _save(folder, model, tokenizer)


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", model_max_length=24, **special)


def _save(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
