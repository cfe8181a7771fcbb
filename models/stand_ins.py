"""Stand-ins for components that a pipeline's class demands and a model does not have.

``DiffusionPipeline.from_pretrained`` refuses a folder whose required component is null, unless it is told so by name;
a component that is there and says nothing needs no telling.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import T5Config, T5EncoderModel, TokenizersBackend


def silent_t5(width: int) -> tuple[Any, Any]:
    """Return a T5 encoder of ``width`` parameters twice, and its tokenizer, that give zeros for every text.

    StableDiffusion3Pipeline without a T5 pads text by ``max_sequence_length`` rows of zeros
    (``_get_t5_prompt_embeds``); this one gives the same rows: it has one token, no layer, and weights 0.
    """
    config = T5Config(
        vocab_size=1,
        d_model=width,
        d_kv=1,
        d_ff=1,
        num_layers=0,
        num_heads=1,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        encoder = T5EncoderModel(config).eval()
    for parameter in encoder.parameters():
        torch.nn.init.zeros_(parameter)
    raw = Tokenizer(models.WordLevel(vocab={"<pad>": 0}, unk_token="<pad>"))
    # Text that is gone cannot be longer than max_sequence_length: the pipeline would warn of it at every call.
    raw.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    return encoder, TokenizersBackend(tokenizer_object=raw, pad_token="<pad>", model_max_length=512)
