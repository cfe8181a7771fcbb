"""Given samples in the forms in which people keep them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.training.data import TrainingData
from tests.support.inside import make_stage, session_of, training_data

TEXTS = [f'"{number:02d}"' for number in range(6)]


def picture(seed: int, size: tuple[int, int] = (40, 24), mode: str = "RGB") -> Image.Image:
    """Return a made-up image of width and height ``size``."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(image: Image.Image, **options: Any) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows; images among their values become files next to them, named by their row."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows):
        named = {}
        for key, value in row.items():
            named[key] = value
            if isinstance(value, Image.Image):
                named[key] = f"{number}-{key}.png"
                value.save(folder / named[key])
        lines.append(json.dumps(named))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"


def singles() -> list[dict[str, Any]]:
    """Return rows of one image each."""
    return [{"prompt": text, "image": picture(number), "license": "CC0"} for number, text in enumerate(TEXTS)]


def pairs() -> list[dict[str, Any]]:
    """Return rows of a chosen and a rejected image."""
    return [
        {"prompt": text, "chosen": picture(number), "rejected": picture(100 + number)}
        for number, text in enumerate(TEXTS)
    ]


def rated() -> list[dict[str, Any]]:
    """Return rows of an image with a rating of 1 to 5."""
    return [{**row, "stars": 1 + number % 5} for number, row in enumerate(singles())]


def write_form(form: str, folder: Path) -> str:
    """Write the single images in one of the supported forms, and return ``data.train``."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [(row["prompt"], row["image"]) for row in singles()]
    if form == "jsonl":
        return str(write_jsonl(folder, singles()))
    if form == "csv":
        for number, (_, image) in enumerate(images):
            image.save(folder / f"{number}.png")
        quoted = ((text.replace('"', '""'), number) for number, (text, _) in enumerate(images))
        lines = [f'"{text}",{number}.png,CC0' for text, number in quoted]
        (folder / "rows.csv").write_text("\n".join(["prompt,image,license", *lines]) + "\n")
        return str(folder / "rows.csv")
    columns = {
        "prompt": [text for text, _ in images],
        "image": [png(image) for _, image in images],
        "license": ["CC0"] * len(images),
    }
    if form == "parquet":
        pq.write_table(pa.table(columns), folder / "rows.parquet")
        return str(folder / "rows.parquet")
    if form == "datasets":
        import datasets

        columns["image"] = [{"bytes": data, "path": None} for data in columns["image"]]
        features = {"prompt": datasets.Value("string"), "image": datasets.Image(), "license": datasets.Value("string")}
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    if form == "folder":
        for number, (text, image) in enumerate(images):
            image.save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(text + "\n")
        return str(folder)
    assert form == "tars"
    for part in range(2):
        write_tar(folder / f"part-{part:02d}.tar", list(enumerate(images))[part::2])
    return str(folder / "part-{00..01}.tar")


def write_tar(path: Path, images: list[tuple[int, tuple[str, Image.Image]]]) -> None:
    """Write a WebDataset tar of images, prompts and licenses."""
    about = json.dumps({"license": "CC0"}).encode()
    rows = ((number, {"png": png(image), "prompt": text.encode(), "json": about}) for number, (text, image) in images)
    write_members(path, rows)


def write_members(path: Path, rows: Iterable[tuple[int, Mapping[str, bytes]]]) -> None:
    """Write a WebDataset tar of numbered rows, each with a file per extension."""
    with tarfile.open(path, "w") as archive:
        for number, files in rows:
            for extension, data in files.items():
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def given_data(context: RunContext, epoch: int) -> TrainingData:
    """Return the training data of an epoch of given samples, whether the epochs before are trained or not."""
    nodes = (Node(0, "policy"), Node(0, "ingest"), Node(epoch, "advantage"))
    modality = make_stage(context, "optimize", epoch).modality
    return TrainingData(context, modality, epoch, [context.chain.ref(node) for node in nodes])


def only_batch(context: RunContext) -> Any:
    """Return the rows of the first epoch's only update as one batch."""
    data = training_data(context)
    samples = data.samples(session_of(context).host)
    (units,) = data.plan(samples)
    return samples.batch(units, len(units.rows))
