"""Rewards whose scores have a gradient to the samples, and differentiable image processors.

Such a reward has the method ``differentiable`` next to ``score``. Both give the same number, except that ``score`` gets
images rounded to 8 bits.

Legend: B rows, H W image pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flowmill.configs.errors import RewardError
from flowmill.configs.exits import is_interruption
from flowmill.models.rewards.base import Batch, Metadata
from flowmill.models.rewards.errors import describe, log_traceback
from flowmill.models.rewards.returned import described

#: Pillow's number of bicubic interpolation, which image processors name.
_BICUBIC = 3


class Differentiable(Protocol):
    """A reward whose scores have a gradient."""

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return (B,) float32 scores with a gradient to the samples.

        Args:
            media: (B, 3, H, W) float32 images of 0 to 1, roughly, neither rounded nor clipped; (B, ...) float32 latents
                for a reward that scores those.
            prompts: B prompts.
            metadata: B mappings with the other columns of the prompt source.
        """


def is_differentiable(reward: Any, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a reward, or its class with some options, has gradients. Where that depends on the options, a
    static method ``follows(options)`` of the class decides it."""
    follows = getattr(reward, "follows", None)
    allowed = follows is None or options is None or follows(options)
    return callable(getattr(reward, "differentiable", None)) and bool(allowed)


def followed(reward: Differentiable, name: str, media: Tensor, batch: Batch) -> Tensor:
    """Return the (B,) scores of a reward, checked: one finite number per sample, with a gradient. Raises RewardError if
    the reward failed, or returned something else."""
    try:
        values = reward.differentiable(media, list(batch.prompts), [dict(row) for row in batch.metadata])
    except BaseException as error:  # A reward may be custom code; its error is raised with its context.
        if is_interruption(error):
            raise
        where = describe(batch.origin, None if len(batch) > 1 else 0, batch.prompts)
        raise RewardError(
            f"The gradient of reward '{name}' failed for {where}: {type(error).__name__}: {error}. It was given "
            f"{tuple(media.shape)} in {media.dtype}. Its traceback is in {log_traceback(error, name, where)}. Mend the "
            "reward and run again; committed results stay."
        ) from error
    if not isinstance(values, torch.Tensor) or values.shape != (len(batch),) or not values.requires_grad:
        raise RewardError(
            f"The method 'differentiable' of reward '{name}' returned {described(values)}. It "
            f"must return a tensor ({len(batch)},), one score per sample, that depends on the samples it was given."
        )
    bad = (~torch.isfinite(values.detach())).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"Reward '{name}' returned {float(values[bad[0]].detach())} for "
            f"{describe(batch.origin, bad[0], batch.prompts)}, which has no gradient. Mend the reward, then run again; "
            "the rollouts are kept."
        )
    return values


def processed(images: Tensor, processor: Any) -> Tensor:
    """Return images as an image processor of transformers transforms them, with a gradient.

    Resizing is Pillow's: bicubic with a = -0.5, whose support grows as the image shrinks. Pillow rounds the result to 8
    bits; this does not. Raises ValueError if the processor transforms images in another way, or crops more pixels than
    there are.

    Args:
        images: (B, 3, H, W) float32, 0 to 1, roughly.
        processor: CLIP's ``image_processor``, or one with the same settings.

    Returns:
        (B, 3, h, w) float32.
    """
    if not processor.do_rescale or abs(processor.rescale_factor * 255 - 1) > 1e-6:
        raise ValueError(f"its image processor scales pixels by {processor.rescale_factor}, not by 1/255")
    if processor.do_resize:
        if int(processor.resample) != _BICUBIC:
            raise ValueError(f"its image processor resizes by method {processor.resample}, not by the bicubic one")
        size = _resized(images.shape[-2:], processor.size)
        if size != tuple(images.shape[-2:]):
            images = torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True)
    if processor.do_center_crop:
        images = _cropped(images, processor.crop_size["height"], processor.crop_size["width"])
    if processor.do_normalize:
        mean, std = (
            torch.tensor(values, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
            for values in (processor.image_mean, processor.image_std)
        )
        images = (images - mean) / std
    return images


def _resized(shape: Sequence[int], size: Any) -> tuple[int, int]:
    """Return height and width after resizing, rounded as the processor does."""
    edge = size.get("shortest_edge")
    if edge is None:
        return int(size["height"]), int(size["width"])
    height, width = shape
    if height <= width:
        return int(edge), int(edge * width / height)
    return int(edge * height / width), int(edge)


def _cropped(images: Tensor, height: int, width: int) -> Tensor:
    rows, columns = images.shape[-2:]
    if height > rows or width > columns:
        raise ValueError(f"its image processor cuts {height} x {width} pixels out of {rows} x {columns}")
    top, left = (rows - height) // 2, (columns - width) // 2
    return images[..., top : top + height, left : left + width]
