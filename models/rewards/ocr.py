"""Text in images, read by PP-OCRv4 from the rapidocr-onnxruntime wheel (``pip install 'flowmill[ocr]'``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from flowmill.configs.extras import require_extra
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, quoted_text

_HEIGHT = 48  # the recognizer's input height
_MARGIN = 16  # white columns left and right; without them letters at the border are misread


@dataclass(slots=True, kw_only=True)
class OcrReward:
    """Flow-GRPO's OCR score (``ocr.py:OcrScorer``): 1 - min(edit distance, length) / length of the quoted text. Spaces
    are removed and case is ignored; a text that contains the target counts as read."""

    needs: ClassVar[Needs] = Needs(media="images")
    perfect: ClassVar[float] = 1.0
    """The text that was read is the quoted one."""
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    detect: bool = False
    """Find text lines first, for large images; otherwise the whole image is one line."""
    min_side: int = 736
    """With ``detect``: images are enlarged until their shorter side has this many pixels; fewer are faster."""
    substring: bool = True
    """A reading that contains the target has distance 0, as in Flow-GRPO's image rule, unlike in its video rule."""
    every: int = 4
    """In whole clips (``frames: clip``) every n-th frame is read, as in Flow-GRPO's video rule."""
    batch_size: int = 32
    """Images per recognizer call."""
    threads: int = 1
    """Threads of the recognizer."""
    _reader: Any = field(init=False)

    def __post_init__(self) -> None:
        require_extra("ocr", "rapidocr_onnxruntime", label="rewards 'ocr'")
        self._reader = _DetectingReader(self.min_side) if self.detect else _LineReader(self.batch_size, self.threads)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return scores and the texts that were read; of a clip, ``clip_score`` and the text of the first frame."""
        if media.ndim == 5:
            return self._score_clips(media[:, :: self.every], prompts)
        texts = self._reader.read(media)
        targets = [quoted_text(prompt) for prompt in prompts]
        values = [
            text_score(text, target, substring=self.substring) for text, target in zip(texts, targets, strict=True)
        ]
        return Scores(np.array(values, np.float32), texts)

    def _score_clips(self, clips: np.ndarray, prompts: Sequence[str]) -> Scores:
        count = clips.shape[1]
        images, repeated = clips.reshape(-1, *clips.shape[2:]), [prompt for prompt in prompts for _ in range(count)]
        frames = self.score(images, repeated, [{}] * len(repeated))
        values = [clip_score(row) for row in frames.values.reshape(-1, count)]
        return Scores(np.array(values, np.float32), list(frames.notes or [])[::count])


def clip_score(frames: np.ndarray) -> float:
    """Return the mean of a clip's frame scores (F,) that are not 0, or 0 (Flow-GRPO ``OcrScorer_video_or_image``)."""
    read = frames[frames > 0]
    return float(read.mean(dtype=np.float64)) if len(read) else 0.0


def text_score(text: str, target: str, *, substring: bool = True) -> float:
    """Return 1 - min(edit distance, length) / length, with spaces and case ignored; raise ValueError if the target is
    empty once spaces are removed."""
    read, expected = (value.replace(" ", "").lower() for value in (text, target))
    if not expected:
        raise ValueError("the prompt asks for no text: put the text to draw in double quotes")
    if substring and expected in read:
        return 1.0
    return 1 - min(edit_distance(read, expected), len(expected)) / len(expected)


def edit_distance(left: str, right: str) -> int:
    """Return the Levenshtein distance (insert, delete, replace, each 1)."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


class _LineReader:
    """The PP-OCRv4 recognizer on whole images, batched; for images that hold one line of text."""

    def __init__(self, batch_size: int, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        spec = importlib.util.find_spec("rapidocr_onnxruntime")
        folder = Path(str(spec.origin)).parent if spec else Path()
        model = folder / "models" / "ch_PP-OCRv4_rec_infer.onnx"
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *characters, " "]
        self._input = self._session.get_inputs()[0].name
        self._batch_size = batch_size

    def read(self, media: np.ndarray) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(media), self._batch_size):
            batch = np.stack([_line_input(image) for image in media[start : start + self._batch_size]])
            probabilities = self._session.run(None, {self._input: batch})[0]
            texts += [self._decode(ids) for ids in probabilities.argmax(-1)]
        return texts

    def _decode(self, ids: np.ndarray) -> str:
        """Greedy CTC: drop repeats, then blanks (id 0)."""
        symbols = ids[(ids != 0) & np.concatenate([[True], ids[1:] != ids[:-1]])]
        return "".join(self._characters[i] for i in symbols)


class _DetectingReader:
    """The whole RapidOCR pipeline: find lines, read them, join them without separator as Flow-GRPO does."""

    def __init__(self, min_side: int) -> None:
        from rapidocr_onnxruntime import RapidOCR

        self._engine = RapidOCR(det_limit_type="min", det_limit_side_len=min_side)

    def read(self, media: np.ndarray) -> list[str]:
        texts = []
        for image in media:
            lines, _ = self._engine(image[:, :, ::-1])
            texts.append("".join(text for _, text, confidence in lines or [] if float(confidence) > 0))
        return texts


def _line_input(image: np.ndarray) -> np.ndarray:
    """Return (3, 48, W) float32 in [-1, 1] with white margins."""
    width = round(image.shape[1] * _HEIGHT / image.shape[0])
    scaled = Image.fromarray(image).resize((width, _HEIGHT), Image.Resampling.BILINEAR)
    pixels = np.asarray(scaled, np.float32).transpose(2, 0, 1) / 127.5 - 1
    return np.pad(pixels, ((0, 0), (0, 0), (_MARGIN, _MARGIN)), constant_values=1.0)
