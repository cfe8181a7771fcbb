"""GenEval (arXiv 2310.11513): presence, count, color and position of the objects that a prompt names.

The detector is Mask2Former of transformers (the benchmark uses the same model in mmdetection), CLIP classifies colors,
and the rules are those of the public ``evaluate_images.py``. The prompt source is the benchmark's own: columns
``tag``, ``include`` and, for some prompts, ``exclude``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import ModelPlace
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import load_pretrained
from flowmill.models.text.control_tokens import as_texts

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
#: The benchmark's names of COCO's 80 classes, in COCO's order: detectors differ in their spelling.
_IN_ORDER = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,"
    "parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,"
    "suitcase,frisbee,skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,"
    "tennis racket,bottle,wine glass,cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,"
    "hot dog,pizza,donut,cake,chair,couch,potted plant,bed,dining table,toilet,tv,laptop,computer mouse,"
    "tv remote,computer keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,scissors,"
    "teddy bear,hair drier,toothbrush"
)
NAMES = tuple(_IN_ORDER.split(","))
#: Minimum confidence of an object, and of one that is counted.
_CONFIDENT, _COUNTED = 0.3, 0.9
#: Maximum objects per class.
_MOST = 16
#: Objects must be apart by this share of their sizes to have a relative position.
_APART = 0.1
#: Pixels outside of the object are painted gray, as the benchmark does.
_GRAY = (153, 153, 153)


@dataclass(frozen=True, slots=True)
class Detection:
    """One detected object."""

    box: np.ndarray
    """(4,) left, top, right, bottom in pixels."""
    mask: np.ndarray
    """(H, W) bool."""


Objects = Mapping[str, Sequence[Detection]]
#: Colors of objects of a class, in order.
Colors = Callable[[Sequence[Detection], str], Sequence[str]]


@dataclass(kw_only=True)
class GenEval:
    """Whether an image meets the demands in the metadata of its prompt.

    ``strict``: 1 or 0, by the benchmark's rules. ``flow_grpo``: the share of demands that are met, as its reward server
    computes it for training (``gen_eval.py:evaluate_reward``): a count scores by its relative error, and a wrong
    position scores half, as that code adds both a 0 and a 1 for it.
    """

    name: ClassVar[str] = "geneval"
    needs: ClassVar[Needs] = Needs(media="images", columns=("tag", "include"), accelerated=True, batch_size=8)
    perfect: ClassVar[float] = 1.0
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    detector: ModelPlace = "facebook/mask2former-swin-small-coco-instance"
    """Folder or hub id of an instance segmentation model of transformers, trained on COCO."""
    detector_revision: str | None = None
    """Commit, tag or branch of the detector."""
    clip: ModelPlace = "openai/clip-vit-large-patch14"
    """Folder or hub id of the CLIP model that classifies colors."""
    clip_revision: str | None = None
    """Commit, tag or branch of the CLIP model."""
    convention: Literal["strict", "flow_grpo"] = "strict"
    """The rules, as above."""
    device: str = "auto"
    """Torch device, or auto."""

    def __post_init__(self) -> None:
        """Load detector and CLIP; raise ConfigError if the detector has other classes than COCO's."""
        self._device = chosen_device(self.device, local_rank(), label="device of reward 'geneval'")
        self._colors: dict[str, Tensor] = {}
        source, revision = self.detector, self.detector_revision
        kind = "Mask2FormerForUniversalSegmentation"
        self._detector = settled(load_pretrained(kind, source, revision, reward=self.name), self._device)
        self._processor = load_pretrained("AutoImageProcessor", source, revision, reward=self.name)
        if self._detector.config.num_labels != len(NAMES):
            raise ConfigError(
                f"reward 'geneval': '{source}' knows {self._detector.config.num_labels} classes, not COCO's "
                f"{len(NAMES)}. Choose a detector that was trained on COCO instances."
            )
        clip = load_pretrained("CLIPModel", self.clip, self.clip_revision, reward=self.name)
        self._clip = settled(clip, self._device)
        self._clip_processor = load_pretrained("CLIPProcessor", self.clip, self.clip_revision, reward=self.name)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image, with the unmet demands as notes."""
        values, notes = [], []
        for image, fields, objects in zip(media, metadata, self._detect(media, metadata), strict=True):

            def colors(detections: Sequence[Detection], name: str, image: np.ndarray = image) -> Sequence[str]:
                return self._colors_of(image, detections, name)

            strict, why = meets(fields, objects, colors)
            values.append(float(strict) if self.convention == "strict" else met_share(fields, objects, colors))
            notes.append("; ".join(why))
        return Scores(np.array(values, np.float32), notes)

    @torch.inference_mode()
    def _detect(self, media: np.ndarray, metadata: Metadata) -> list[Objects]:
        """Return the objects of every image by class, by descending confidence."""
        outputs = self._detector(**self._processor(images=list(media), return_tensors="pt").to(self._device))
        segmented = self._processor.post_process_instance_segmentation(
            outputs, threshold=_CONFIDENT, target_sizes=[media.shape[1:3]] * len(media), return_binary_maps=True
        )
        counted = [fields.get("tag") == "counting" for fields in metadata]
        return [
            _by_class(segments, _COUNTED if counts else _CONFIDENT)
            for segments, counts in zip(segmented, counted, strict=True)
        ]

    @torch.inference_mode()
    def _colors_of(self, image: np.ndarray, detections: Sequence[Detection], name: str) -> list[str]:
        """Return the color of each object, classified by CLIP on a crop with gray background."""
        if name not in self._colors:
            texts = [template.format(color=color, name=name) for color in COLORS for template in _TEMPLATES]
            tokens = self._clip_processor.tokenizer(
                as_texts(self._clip_processor.tokenizer, texts), padding=True, truncation=True, return_tensors="pt"
            )
            of_texts = nn.functional.normalize(self._clip.get_text_features(**tokens.to(self._device)).pooler_output)
            mean = of_texts.reshape(len(COLORS), len(_TEMPLATES), -1).mean(1)
            self._colors[name] = nn.functional.normalize(mean)
        cut = [_cut_out(image, one) for one in detections]
        pixels = self._clip_processor.image_processor(cut, return_tensors="pt")["pixel_values"]
        of_images = nn.functional.normalize(self._clip.get_image_features(pixels.to(self._device)).pooler_output)
        return [COLORS[best] for best in (of_images @ self._colors[name].T).argmax(1).tolist()]


def meets(fields: Mapping[str, Any], objects: Objects, colors: Colors) -> tuple[bool, list[str]]:
    """Return whether an image meets all demands, and the unmet ones (``evaluate_images.py:evaluate``).

    Args:
        fields: the prompt's ``include``: class, count, and maybe color or position (relation, number of an earlier
            demand); and ``exclude``: class, and the count that must not be reached.
        objects: detected objects by class, by descending confidence.
        colors: classifies the colors of objects.
    """
    wrong: list[str] = []
    groups: list[Sequence[Detection] | None] = []
    for demand in fields.get("include") or ():
        name, count = demand["class"], int(demand["count"])
        detections = list(objects.get(name, ()))[:count]
        if len(detections) < count:
            missing = f"expected {name} >= {count}, found {len(detections)}"
        else:
            missing = _miscolored(demand, detections, colors) or _misplaced(demand, detections, groups)
        groups.append(None if missing else detections)
        wrong += [missing] if missing else []
    for demand in fields.get("exclude") or ():
        name, count = demand["class"], int(demand["count"])
        if len(objects.get(name, ())) >= count:
            wrong.append(f"expected {name} < {count}, found {len(objects[name])}")
    return not wrong, wrong


def met_share(fields: Mapping[str, Any], objects: Objects, colors: Colors) -> float:
    """Return the mean score of the demands, as Flow-GRPO's reward server computes it for training. ``fields``: the
    prompt's ``include``; ``exclude`` is ignored."""
    parts: list[float] = []
    groups: list[Sequence[Detection] | None] = []
    for demand in fields.get("include") or ():
        count, detections = int(demand["count"]), list(objects.get(demand["class"], ()))
        parts.append(1 - abs(count - len(detections)) / count)
        met = len(detections) == count
        if not met and (demand.get("color") or demand.get("position")):
            parts.append(0.0)
        if met and demand.get("color"):
            right = list(colors(detections, demand["class"])).count(demand["color"])
            parts.append(1 - abs(count - right) / count)
            met = right == count
        if met and demand.get("position"):
            target = groups[demand["position"][1]]
            met = not _misplaced(demand, detections, groups)
            # Where there is a target, that code always adds a 1, after a 0 for a wrong position.
            parts += [1.0] if met else [0.0] if target is None else [0.0, 1.0]
        groups.append(detections if met else None)
    return sum(parts) / len(parts) if parts else 0.0


def relations(one: np.ndarray, other: np.ndarray) -> set[str]:
    """Return the position of a box (4,) relative to another: left of, right of, above, below; two or none can hold."""
    boxes = np.stack([one, other]).reshape(2, 2, 2).astype(np.float64)
    centers, sizes = boxes.mean(1), np.abs(boxes[:, 1] - boxes[:, 0])
    offset = centers[0] - centers[1]
    apart = np.maximum(np.abs(offset) - _APART * sizes.sum(0), 0) * np.sign(offset)
    if (np.abs(apart) < 1e-3).all():
        return set()
    across, down = apart / np.linalg.norm(offset)
    flags = {"left of": across < -0.5, "right of": across > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, holds in flags.items() if holds}


def _miscolored(demand: Mapping[str, Any], detections: Sequence[Detection], colors: Colors) -> str:
    if not demand.get("color"):
        return ""
    seen = list(colors(detections, demand["class"]))
    if seen.count(demand["color"]) >= int(demand["count"]):
        return ""
    return f"expected {demand['color']} {demand['class']}, found {', '.join(seen)}"


def _misplaced(
    demand: Mapping[str, Any], detections: Sequence[Detection], groups: Sequence[Sequence[Detection] | None]
) -> str:
    if not demand.get("position"):
        return ""
    relation, number = demand["position"]
    target = groups[number]
    if target is None:
        return f"no target for {demand['class']} to be {relation}"
    for one in detections:
        for other in target:
            true = relations(one.box, other.box)
            if relation not in true:
                return (
                    f"expected {demand['class']} {relation} its target, found {' and '.join(sorted(true)) or 'neither'}"
                )
    return ""


def _by_class(segmented: Mapping[str, Any], least: float) -> dict[str, list[Detection]]:
    """Return objects above a confidence by the name of their class, by descending confidence."""
    detections: dict[str, list[Detection]] = {}
    numbered = [
        (number, segment) for number, segment in enumerate(segmented["segments_info"]) if segment["score"] > least
    ]
    for number, segment in sorted(numbered, key=lambda one: -one[1]["score"]):
        objects = detections.setdefault(NAMES[segment["label_id"]], [])
        mask = np.asarray(segmented["segmentation"][number].cpu() > 0)
        if mask.any() and len(objects) < _MOST:
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            objects.append(Detection(np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]), mask))
    return detections


def _cut_out(image: np.ndarray, detection: Detection) -> Image.Image:
    left, top, right, bottom = (int(value) for value in detection.box)
    painted = np.where(detection.mask[..., None], image, np.array(_GRAY, np.uint8))
    return Image.fromarray(painted[top:bottom, left:right])
