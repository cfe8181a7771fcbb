"""A tiny Janus that draws two handwritten digits token by token: the coder of images, then the language model.
Legend: N images, B rows, D width of codes, K codebook, T tokens of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import BOS, EOS, PAD, Characters
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.quickstart.pretrain import update

_SPECIAL: Mapping[str, str] = {
    "boi_token": "<begin_of_image>",
    "image_token": "<image_placeholder>",
    "eoi_token": "<end_of_image>",
}
_CHARACTERS = Characters('0123456789"', _SPECIAL)
_BEGIN, _IMAGE = 3, 4
#: Pixels of a side of images, and of a token.
SIDE, _PATCH = 16, 4
_TOKENS = (SIDE // _PATCH) ** 2
_WIDTH, _CODES, _CODE_WIDTH = 96, 128, 8
_LEARNING_RATE, _CODER_BATCH, _BATCH = 3e-3, 32, 64
#: Share of the coder's steps before codes are used, images of which the first codes are means, and rounds of that.
_PLAIN, _SEEN, _ROUNDS = 0.25, 1024, 15
_CORPUS = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedDigitsBuilder:
    """A Janus of 0.6 million parameters, 128 codes and 16 tokens per image; the prompt is the number in double
    quotes."""

    coder_steps: int = 250
    """Steps of the coder of images."""
    steps: int = 400
    """Steps of the language model: 400 give some 50 % right images at guidance 2, 700 some 85 %."""
    prompt_dropout: float = 0.15
    """Share of rows that are trained without their prompt, as guidance needs."""
    seed: int = 0
    """Seed of weights and order."""

    latents: ClassVar[None] = None

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model, tokenizer and processor."""
        texts, gray = digit_pairs(_CORPUS, seed=1)
        # Janus draws squares: both digits get half the width.
        narrow = torch.from_numpy(gray).float().unflatten(2, (SIDE, 2)).mean(-1)
        pixels = (narrow / 127.5 - 1)[:, None].expand(-1, 3, -1, -1).contiguous()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = _fresh_model()
            codes = _train_coder(model.model.vqmodel, pixels, self.coder_steps, report)
            prompts = torch.tensor([[BOS, *_CHARACTERS.tokens(f'"{text}"'), _BEGIN] for text in texts])
            _train_drawing(model, prompts, codes, self.steps, self.prompt_dropout, report)
        write(model, folder)


def tiny_model(seed: int) -> Any:
    """Return a fresh model; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _fresh_model()


def write(model: Any, folder: Path) -> None:
    """Write a tiny model, its tokenizer and its processor as ``from_pretrained`` reads them."""
    from transformers import JanusImageProcessorPil, JanusProcessor

    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = JanusImageProcessorPil(size={"height": SIDE, "width": SIDE}, **halves)
    model.save_pretrained(folder)
    JanusProcessor(images, _CHARACTERS.tokenizer(), num_image_tokens=_TOKENS).save_pretrained(folder)


def _fresh_model() -> Any:
    from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

    text = {
        "model_type": "llama",
        "vocab_size": 24,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    # It reads no images.
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": SIDE,
        "patch_size": _PATCH,
        "projection_dim": _WIDTH,
        "num_image_tokens": _TOKENS,
        "depth": 1,
    }
    coder = {
        "embed_dim": _CODE_WIDTH,
        "num_embeddings": _CODES,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "projection_dim": _WIDTH,
        "image_token_embed_dim": _WIDTH,
    }
    model = JanusForConditionalGeneration(
        JanusConfig(
            text_config=text,
            vision_config=vision,
            vq_config=coder,
            image_token_id=_IMAGE,
            tie_word_embeddings=False,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, generation_kwargs={"boi_token_id": _BEGIN}
    )
    return model


def _steps(
    parameters: Iterable[nn.Parameter], steps: int, loss: Callable[[int], Tensor], report: Callable[[int, int], None]
) -> None:
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps, pct_start=0.1)
    for step in range(steps):
        update(loss(step), trained, optimizer, schedule)
        report(step + 1, steps)


def _train_coder(coder: Any, pixels: Tensor, steps: int, report: Report) -> Tensor:
    """Train a VQ-VAE (arXiv 1711.00937) with codes of length 1, as Janus decodes them; return the (N, T) codes."""
    book, first = coder.quantize.embedding.weight, int(_PLAIN * steps)

    def directions(images: Tensor) -> Tensor:
        return F.normalize(coder.quant_conv(coder.encoder(images)).permute(0, 2, 3, 1), dim=-1)

    def loss(step: int) -> Tensor:
        batch = pixels[torch.randint(len(pixels), (_CODER_BATCH,))]
        vectors = directions(batch)
        if step == first:
            with torch.no_grad():
                book.copy_(_first_codes(torch.cat([directions(part) for part in pixels[:_SEEN].split(128)])))
        taken, distance = vectors, torch.zeros(())
        if step >= first:
            codes = F.normalize(book, dim=-1)
            nearest = codes[(vectors.detach() @ codes.detach().T).argmax(-1)]
            # Codes follow the images, and images, more slowly, their codes: commitment 0.25, as in the paper.
            distance = _CODE_WIDTH * (
                F.mse_loss(nearest, vectors.detach()) + 0.25 * F.mse_loss(vectors, nearest.detach())
            )
            taken = vectors + (nearest - vectors).detach()
        decoded = coder.decoder(coder.post_quant_conv(taken.permute(0, 3, 1, 2)))
        return F.mse_loss(decoded, batch) + 0.1 * F.l1_loss(decoded, batch) + distance

    _steps(coder.parameters(), steps, loss, partial(report, "image tokens"))
    with torch.no_grad():
        book.copy_(F.normalize(book, dim=-1))
        coder.eval().requires_grad_(False)
        return torch.cat([coder.encode(part).image_tokens.view(-1, _TOKENS) for part in pixels.split(256)])


def _first_codes(directions: Tensor) -> Tensor:
    """Return (K, D) means of directions (..., D), each of those nearest to it (spherical k-means)."""
    points = directions.flatten(0, -2)
    codes = points[torch.randperm(len(points))[:_CODES]]
    for _ in range(_ROUNDS):
        nearest = (points @ codes.T).argmax(-1)
        sums = torch.zeros_like(codes).index_add_(0, nearest, points)
        others = points[torch.randperm(len(points))[:_CODES]]
        codes = torch.where((torch.bincount(nearest, minlength=_CODES) > 0)[:, None], F.normalize(sums, dim=-1), others)
    return codes


def _train_drawing(model: Any, prompts: Tensor, codes: Tensor, steps: int, dropout: float, report: Report) -> None:
    """Train a model in place to continue (N, P) prompts, some of them blank, with (N, T) codes."""
    core = model.model
    blank = prompts.masked_fill((prompts != BOS) & (prompts != _BEGIN), PAD)

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(codes), (_BATCH,))
        texts = torch.where(torch.rand(_BATCH, 1) < dropout, blank[rows], prompts[rows])
        drawn = model.prepare_embeddings_for_image_generation(codes[rows, :-1])
        embeds = torch.cat([model.get_input_embeddings()(texts), drawn], 1)
        states = core.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = core.generation_head(states[:, prompts.shape[1] - 1 :])
        return F.cross_entropy(logits.flatten(0, 1), codes[rows].flatten())

    trained = [core.language_model, core.generation_embeddings, core.generation_aligner, core.generation_head]
    parameters = [parameter for part in trained for parameter in part.parameters()]
    _steps(parameters, steps, loss, partial(report, "language model"))
    model.eval()
