"""VideoAlign's VideoReward (arXiv 2501.13918): a Qwen2-VL that rates a clip's visual quality, motion and alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import interpolate

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import FilePlace, ModelPlace
from flowmill.models.library_loading import read_json
from flowmill.models.rewards.answer_parsing import TOKEN, Backbone, read_instruction, token_grid
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.rewards.weight_files import WeightsFile

ASPECTS = ("VQ", "MQ", "TA")
_MARKS = [f"<|{aspect}_reward|>" for aspect in ASPECTS]
#: Side of a patch, patches per side of a token, frames of a patch.
_PATCH, _MERGED, _FRAMES = 14, 2, 2
#: Minimum pixels of a frame, and minimum and maximum frames of a clip: ``vision_process.py``.
_LEAST_PIXELS, _LEAST_FRAMES, _MOST_FRAMES = 128 * TOKEN**2, 4, 768
#: Mean and standard deviation of the model's image processor, which are CLIP's.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of clips and scores in the published ``model_config.json``."""

    fps: float
    """Sampled frames per second."""
    pixels: int
    """Maximum pixels of a frame."""
    scale: float
    """Scale of the adapters, where the weights have some."""
    mean: tuple[float, ...]
    """Mean, and standard deviation, of each aspect's scores."""
    std: tuple[float, ...]

    @classmethod
    def read(cls, file: Path) -> Settings:
        """Read the published file; raise ConfigError if it cannot be read, or has other contents or unsupported
        values."""
        where = f"reward 'video_align': option 'settings': '{file}'"
        try:
            content = read_json(file)
            data, lora, scores = (content[name] for name in ("data_config", "peft_lora_config", "inference_config"))
            rank = math.sqrt(lora["lora_r"]) if lora.get("use_rslora") else lora["lora_r"]
            settings = cls(
                fps=float(data["fps"]),
                pixels=int(data["max_frame_pixels"]),
                scale=lora["lora_alpha"] / rank,
                mean=tuple(float(scores[f"{aspect}_mean"]) for aspect in ASPECTS),
                std=tuple(float(scores[f"{aspect}_std"]) for aspect in ASPECTS),
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}.") from None
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{where} is not VideoReward's model_config.json: {type(error).__name__} {error}."
            ) from None
        if data.get("sample_type", "uniform") != "uniform" or data.get("num_frames") is not None:
            raise ConfigError(f"{where} samples frames in another way than evenly spaced at a rate per second.")
        if not settings.fps > 0 or settings.pixels < _LEAST_PIXELS or min(settings.std) <= 0:
            raise ConfigError(f"{where} has an fps, a max_frame_pixels or a std that cannot be.")
        return settings


@dataclass(kw_only=True)
class VideoAlign(Pretrained):
    """VideoReward's scores at its three tokens, standardized by mean and std (``inference.py``, ``use_norm``). Frames
    are evenly spaced, at the rate of its training, and scaled to at most its maximum of pixels."""

    name: ClassVar[str] = "video_align"
    needs: ClassVar[Needs] = Needs(
        media="clips",
        accelerated=True,
        batch_size=4,
        watched_by=(("exposure", "policies learn to over-expose, which it likes"),),
    )

    weights: FilePlace
    """Safetensors copy of its ``model.pth`` (KwaiVGI/VideoReward), with its names."""
    settings: FilePlace
    """Its ``model_config.json``."""
    instruction: FilePlace
    """Text file with the instruction of its training, with {text_prompt} for the prompt and its three tokens."""
    aspect: Literal["overall", "VQ", "MQ", "TA"] = "overall"
    """Visual quality, motion quality, text alignment, or the sum of the three."""
    clip_fps: PositiveFloat = 16.0
    """Frames of the clips per second, ``rollout.media.fps``."""
    model: ModelPlace = "Qwen/Qwen2-VL-2B-Instruct"
    """Folder or hub id of its base model, for its sizes and tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, except for those of the head, which are float32."""

    def __post_init__(self) -> None:
        """Load model and head; raise ConfigError if a file cannot be used."""
        device = self.chosen()
        self._settings = Settings.read(Path(self.settings))
        self._instruction = read_instruction(self.name, Path(self.instruction), _MARKS)
        file = WeightsFile(reward=self.name, file=self.weights)
        stored = merged(file.read(), self._settings.scale)
        head = stored.pop("rm_head.weight", None)
        if head is None or head.shape[0] not in (1, len(ASPECTS)):
            raise file.unusable("it has no rm_head.weight of one or three rows")
        dtype: torch.dtype = getattr(torch, self.dtype)
        self._reader = Backbone(
            file, stored, model=self.model, revision=self.revision, marks=_MARKS, device=device, dtype=dtype
        )
        if head.shape[1] != self._reader.width:
            raise file.unusable(f"rm_head.weight reads {head.shape[1]} numbers, and the model has {self._reader.width}")
        # A head of three rows has one per aspect; a single row serves all.
        self._head = head.float().expand(len(ASPECTS), -1).to(device)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (F, H, W, 3) uint8 clip, with the scores of all aspects as a note."""
        seen = [self._look(clip) for clip in media]
        tokens = [int(grid.prod()) // _MERGED**2 for _, grid in seen]
        texts = [
            self._reader.text(self._instruction, prompt, "video", count)
            for prompt, count in zip(prompts, tokens, strict=True)
        ]
        pixels, grids = torch.cat([patches for patches, _ in seen]), torch.stack([grid for _, grid in seen])
        states = torch.stack(self._reader.verdicts(texts, pixels, grids, "video"), dim=1)
        raw = (states * self._head).sum(-1).cpu().numpy()
        mean, std = (np.array(each, np.float32) for each in (self._settings.mean, self._settings.std))
        scores = (raw - mean) / std
        chosen = scores.sum(1) if self.aspect == "overall" else scores[:, ASPECTS.index(self.aspect)]
        named = [zip(ASPECTS, row, strict=True) for row in scores]
        return Scores(
            chosen.astype(np.float32), [" ".join(f"{name} {value:.2f}" for name, value in row) for row in named]
        )

    def _look(self, clip: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return patches and grid of the sampled frames."""
        frames = clip[frame_numbers(len(clip), self.clip_fps, self._settings.fps)]
        rows, columns = token_grid(*frames.shape[1:3], least=_LEAST_PIXELS, most=self._settings.pixels)
        size = (rows * TOKEN, columns * TOKEN)
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
        scaled = interpolate(pixels, size, mode="bicubic", antialias=True).round().clamp(0, 255)
        return patches_of(scaled / 255)


def frame_numbers(count: int, fps: float, rate: float) -> list[int]:
    """Return the sampled frames of a clip (``vision_process.py``: ``smart_nframes``, ``uniform``). Raises ValueError if
    it has one frame. ``fps``: its frames per second; ``rate``: sampled frames per second."""
    most = min(_MOST_FRAMES, count) // _FRAMES * _FRAMES
    if most < _FRAMES:
        raise ValueError(f"a clip has {count} frame, and video_align looks at {_FRAMES} at least; set model.frames")
    number = round(min(max(count / fps * rate, _LEAST_FRAMES), most) / _FRAMES) * _FRAMES
    return torch.linspace(0, count - 1, number).round().long().tolist()


def patches_of(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return frames as patches for Qwen2-VL's vision model (transformers' ``Qwen2VLImageProcessor``). ``frames``: (F,
    3, H, W) float32 in [0, 1]; F even, sides whole tokens. Returns (patches, 3 * 2 * 14 * 14) float32, those of a token
    adjacent; (3,) int64 of patches in time, height, width."""
    mean, std = (torch.tensor(each, device=frames.device)[:, None, None] for each in (_MEAN, _STD))
    grid = torch.tensor([len(frames) // _FRAMES, frames.shape[2] // _PATCH, frames.shape[3] // _PATCH])
    time, rows, columns = grid.tolist()
    shape = (time, _FRAMES, 3, rows // _MERGED, _MERGED, _PATCH, columns // _MERGED, _MERGED, _PATCH)
    cut = ((frames - mean) / std).reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(time * rows * columns, 3 * _FRAMES * _PATCH**2), grid


def merged(stored: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return published weights by their names in the model, with adapters merged: W + scale B A. ``stored``: tensors;
    with peft's names (``base_model.model.``, ``.base_layer``, ``.lora_A.default``) or without; ``scale``: alpha / r, or
    alpha / sqrt(r) (rslora)."""
    plain = {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items()}
    weights = {
        name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."): tensor
        for name, tensor in plain.items()
        if ".lora_" not in name and ".original_module." not in name
    }
    for name, down in plain.items():
        layer, _, rest = name.partition(".lora_A.")
        if rest:
            up = plain[f"{layer}.lora_B.{rest}"]
            weight = weights[f"{layer}.weight"]
            weights[f"{layer}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return weights
