"""Pre-trains a tiny pipeline from scratch: the autoencoder, then text encoders and transformer by flow matching.
Legend: N images, B batch, C h w latent, L tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowmill.models.quickstart.base import Report

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, StableDiffusion3Pipeline

_BATCH = 64
_VAE_BATCH = 32


def pretrain(
    pipeline: StableDiffusion3Pipeline,
    texts: Sequence[str],
    images: np.ndarray,
    *,
    vae_steps: int,
    steps: int,
    report: Report,
    prompt_dropout: float = 0.0,
) -> None:
    """Train a new pipeline in place; deterministic for a machine and thread count.

    Args:
        texts: N texts; the prompt of a text is the text in double quotes.
        images: (N, H, W) uint8.
        report: called with (activity, done, total) after each step.
        prompt_dropout: share of rows with the empty prompt instead of their own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pixels = as_pixels(images)
        train_autoencoder(pipeline.vae, pixels, vae_steps, report)
        latents = normalized_latents(pipeline.vae, pixels)
        tokens = _tokens(pipeline, [f'"{text}"' for text in texts])
        empty = _tokens(pipeline, [""])
        # A separate generator, so that a base model without dropout stays bitwise the same.
        draws = torch.Generator().manual_seed(1)

        def rows_of(rows: Tensor) -> Tensor:
            dropped = torch.rand(len(rows), 1, generator=draws) < prompt_dropout
            return torch.where(dropped, empty, tokens[rows])

        modules = nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2])
        count = len(latents)
        train_flow(modules, lambda rows: _flow_loss(modules, rows_of(rows), latents[rows]), count, steps, report)


def as_pixels(images: np.ndarray) -> Tensor:
    """Return (N, H, W) uint8 gray images as (N, 3, H, W) float32, -1 to 1."""
    return (torch.from_numpy(images).float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)


def _tokens(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> Tensor:
    """Return the (N, L) int64 tokens of prompts."""
    return pipeline.tokenizer(
        prompts, padding="max_length", max_length=pipeline.tokenizer.model_max_length, return_tensors="pt"
    ).input_ids


def train_autoencoder(vae: AutoencoderKL, pixels: Tensor, steps: int, report: Report) -> None:
    """Train an autoencoder on (N, 3, H, W) pixels in place, and freeze it."""
    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=4e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.1)
    for step in range(steps):
        batch = pixels[torch.randint(len(pixels), (_VAE_BATCH,))]
        posterior = vae.encode(batch).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = F.mse_loss(decoded, batch) + 0.1 * F.l1_loss(decoded, batch) + 1e-4 * kl
        update(loss, list(vae.parameters()), optimizer, schedule)
        report("autoencoder", step + 1, steps)
    vae.eval().requires_grad_(False)


@torch.no_grad()
def normalized_latents(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Return (N, C, h, w) latents of mean 0 and std 1, and write the factors into the VAE's config."""
    latents = torch.cat([vae.encode(batch).latent_dist.mean for batch in pixels.split(256)])
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return (latents - shift) * scale


def train_flow(
    modules: nn.ModuleList, loss: Callable[[Tensor], Tensor], count: int, steps: int, report: Report
) -> None:
    """Train modules in place to the average of their weights; ``loss``: of the numbers of rows, ``count`` in all."""
    modules.train()
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    average = copy.deepcopy(modules).eval()
    for step in range(steps):
        update(loss(torch.randint(count, (_BATCH,))), parameters, optimizer, schedule)
        decay = min(0.995, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(modules.parameters()), 1 - decay)
        report("flow matching", step + 1, steps)
    modules.load_state_dict(average.state_dict())
    modules.eval()


def noised(clean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (N, ...) latents at logit-normal times (arXiv 2403.03206, eq. 19), the times (N,), and velocities."""
    noise = torch.randn_like(clean)
    sigma = torch.sigmoid(torch.randn(len(clean)))
    mix = sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1 - mix) * clean + mix * noise, sigma, noise - clean


def _flow_loss(modules: nn.ModuleList, tokens: Tensor, clean: Tensor) -> Tensor:
    noisy, sigma, target = noised(clean)
    transformer, *text_encoders = modules
    outputs = [encoder(tokens, output_hidden_states=True) for encoder in text_encoders]
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], -1)
    velocity = transformer(
        hidden_states=noisy,
        # The pipeline appends one row of zeros where a T5 would be.
        encoder_hidden_states=F.pad(embeds, (0, 0, 0, 1)),
        pooled_projections=torch.cat([output[0] for output in outputs], -1),
        timestep=sigma * 1000,
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, target)


def update(
    loss: Tensor,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Take a step on a loss, with gradients clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
