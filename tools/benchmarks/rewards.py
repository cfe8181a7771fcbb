"""What scoring costs beside the bare call of the model: a CLIP of ViT-B/16's size on images of 512 x 512.

python -m tools.benchmarks.rewards --samples 32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from flowmill.configs.schema import StoreSection
from flowmill.models.quickstart.text import clip_tokenizer
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import score
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.shard_files import Files
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.components import open_trajectory_store
from tests.support.trajectories import write_samples

_ROWS, _SIDE, _ROUNDS = 16, 512, 3
_REF = ArtifactRef("trajectories", "c" * 32)


def write_model(folder: Path) -> str:
    """Write a random CLIP of ViT-B/16's size with its processor."""
    tokenizer = clip_tokenizer()
    text = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config={"patch_size": 16})).save_pretrained(folder)
    CLIPProcessor(image_processor=CLIPImageProcessor(), tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


def bare(folder: str, images: np.ndarray, prompts: list[str]) -> float:
    """Return seconds of transformers' own call, 16 rows at a time, after one to warm up."""
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def call(start: int) -> None:
        rows = slice(start, start + _ROWS)
        inputs = processor(
            text=prompts[rows], images=list(images[rows]), return_tensors="pt", padding="max_length", truncation=True
        )
        model(**inputs)

    call(0)
    begun = time.perf_counter()
    for start in range(0, len(images), _ROWS):
        call(start)
    return time.perf_counter() - begun


def stored(store: ArtifactStore, images: np.ndarray, prompts: list[str]) -> Files:
    """Commit the images as a shard of trajectories and return its files."""
    common = {"epoch": 1, "replica": 0, "seed": 0, "policy": "", "sigmas": [1.0, 0.0], "group_id": "g"}
    samples = [
        Sample(sample_id=f"s{n}", prompt_id=f"p{n}", prompt=prompts[n], media=image, **common)  # type: ignore[arg-type]
        for n, image in enumerate(images)
    ]
    with store.root.staging() as staging:
        known = write_samples(open_trajectory_store("webdataset"), staging, samples)
        return store.files(_REF, store.commit(_REF, "000000-000001", staging, rows=len(images), hashed=known))


def bench(samples: int = 32) -> dict[str, float]:
    """Return seconds of the bare call, of the reward, and of reading, decoding and scoring a shard; and ratios."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (samples, _SIDE // 8, _SIDE // 8, 3), np.uint8)
    images, prompts = coarse.repeat(8, 1).repeat(8, 2), [f"a picture of {number} things" for number in range(samples)]
    times: dict[str, list[float]] = {"bare_s": [], "reward_s": [], "shard_s": []}
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "clip")
        files = stored(ArtifactStore(StoreSection(root=f"{place}/store")), images, prompts)
        reward = make_reward("clip_score", {"model": folder})
        plain = Batch(media=images, prompts=prompts, metadata=[{}] * samples)
        score(reward, "clip", plain.take(range(_ROWS)))
        for _ in range(_ROUNDS):
            times["bare_s"].append(bare(folder, images, prompts))
            begun = time.perf_counter()
            score(reward, "clip", plain)
            times["reward_s"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            opened = open_trajectory_store("webdataset").open(files)
            media = np.stack([opened.media(row) for row in range(samples)])
            score(reward, "clip", Batch(media=media, prompts=prompts, metadata=[{}] * samples))
            times["shard_s"].append(time.perf_counter() - begun)
    least = {name: min(values) for name, values in times.items()}
    ratios = {f"bare_over_{name[:-2]}": least["bare_s"] / least[name] for name in ("reward_s", "shard_s")}
    return {**least, **ratios}


def table(samples: int = 32) -> str:
    """Return the figures of scoring."""
    lines = ["| | |", "|---|---|", *(f"| {name} | {value:.4g} |" for name, value in bench(samples).items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    sys.stdout.write(table(parser.parse_args().samples))
