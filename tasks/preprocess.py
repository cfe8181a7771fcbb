"""Prompts in, embeddings and a prompt table out. Each distinct prompt is encoded once ever per encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from configs.errors import PromptError
from configs.fingerprint import canonical_json, fingerprint
from configs.registry import resolve
from configs.schema import RunConfig
from models.policies import IMAGE_CONDITIONED, NOT_ENCODED, POLICIES
from models.policies.base import Policy
from storage.embeddings import EmbeddingCache
from storage.records import ShardRecord
from storage.schema import PROMPTS, write_table
from tasks.chain import Node
from tasks.prompts import IMAGE, Prompt, read_prompts
from tasks.stage import Output, Shard, Stage
from tasks.workspace import uses_guidance

_PROMPTS_PER_SHARD = 1024


def source_prompts(config: RunConfig) -> dict[str, list[Prompt]]:
    """Return the prompts the config names, by split: train, heldout, and negative when guidance needs it.

    Raises:
        PromptError: a source cannot be used, or a held-out prompt is trained on.
    """
    section = config.prompts
    train = read_prompts(section.train, section, where="prompts.train")
    heldout = read_prompts(section.heldout, section, where="prompts.heldout") if section.heldout else []
    shared = {prompt.condition for prompt in train} & {prompt.condition for prompt in heldout}
    if shared:
        raise PromptError(
            f"prompts.heldout: {len(shared)} prompts are in prompts.train too, the first is {min(shared)!r}. Their "
            "evaluation would not be of held-out prompts. Remove them from one of the two."
        )
    negative = _negative(config, [*train, *heldout]) if uses_guidance(config) else []
    return {"train": train, "heldout": heldout, "negative": negative}


def _negative(config: RunConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the negative prompt, with every image to start from where prompts have one."""
    text = config.model.negative_prompt
    images = {prompt.metadata[IMAGE]: prompt.image for prompt in prompts if prompt.image is not None}
    if not images:
        return [Prompt(text=text)]
    return [Prompt(text=text, metadata={IMAGE: key}, image=path) for key, path in images.items()]


class EncodeStage(Stage):
    """Encodes the prompts that are not in the cache yet; text encoders are loaded only if there are any."""

    name = "encode"
    version = 2
    kind = "embeddings"
    grows = True

    def options(self) -> Mapping[str, Any]:
        """What identifies the encoder, and where it encodes images too, the size they are scaled to."""
        model = self.config.model
        unused = NOT_ENCODED.get(model.policy, frozenset())
        options = {name: value for name, value in model.options.items() if name not in unused}
        about = {"policy": model.policy, "dtype": model.dtype, "options": options}
        # What a family of one's own encodes is not known.
        if model.policy in POLICIES and model.policy not in IMAGE_CONDITIONED:
            return about
        return {**about, "height": model.height, "width": model.width, "frames": model.frames}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)

    def shards(self) -> list[Shard]:
        """Chunks of the missing prompts, named by their content."""
        chunks = range(0, len(self._missing), _PROMPTS_PER_SHARD)
        return [self._shard(start, min(start + _PROMPTS_PER_SHARD, len(self._missing))) for start in chunks]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Encode one chunk in batches of one fixed size, so that rows do not depend on their neighbors."""
        self.workspace.use_threads()
        conditions = self._missing[shard.start : shard.stop]
        rows = self._encode([self._prompts[condition] for condition in conditions])
        self._cache.write(folder, conditions, rows)
        return Output(rows=len(conditions))

    @cached_property
    def _missing(self) -> list[str]:
        return self._cache.missing(list(self._prompts))

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        prompts = [prompt for split in source_prompts(self.config).values() for prompt in split]
        return {prompt.condition: prompt for prompt in prompts}

    @cached_property
    def _cache(self) -> EmbeddingCache:
        return EmbeddingCache(self.workspace.store, self.ref)

    @cached_property
    def _policy(self) -> Policy:
        family = resolve(POLICIES, self.config.model.policy, what="model.policy")
        return self.workspace.load_policy(family.encoding_parts)

    def _shard(self, start: int, stop: int) -> Shard:
        return Shard(fingerprint(self._missing[start:stop])[:16], start, stop)

    def _encode(self, prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
        size = self.config.execution.encode_batch_size
        parts: list[dict[str, torch.Tensor]] = []
        for start in range(0, len(prompts), size):
            batch = list(prompts[start : start + size])
            padded = batch + [batch[-1]] * (size - len(batch))
            encoded = self._policy.encode([prompt.text for prompt in padded], *_images(padded))
            # NumPy has no bfloat16. Whole numbers stay what they are: as floats, a model's dtype would round them.
            wide = {name: rows.float() if rows.is_floating_point() else rows for name, rows in encoded.items()}
            parts.append({name: rows[: len(batch)].cpu() for name, rows in wide.items()})
            self.workspace.reporter.progress(self.name, 0, min(start + size, len(prompts)), len(prompts))
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}


def _images(prompts: Sequence[Prompt]) -> list[list[np.ndarray]]:
    """Return the images of prompts as one further argument, or none."""
    paths = [prompt.image for prompt in prompts if prompt.image is not None]
    if not paths:
        return []
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(np.asarray(image.convert("RGB")))
    return [images]


class PreprocessStage(Stage):
    """The prompt table of a run, with the content hash of every prompt's embedding."""

    name = "preprocess"
    kind = "prompts"

    def options(self) -> Mapping[str, Any]:
        """The prompts themselves."""
        return {"prompts": self.workspace.prompts_identity}

    def upstream(self) -> tuple[Node, ...]:
        """The embedding cache."""
        return (Node(0, "encode"),)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("prompts")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write the table."""
        rows = [(split, prompt) for split, prompts in self._prompts.items() for prompt in prompts]
        columns = {
            "prompt_id": [prompt.id for _, prompt in rows],
            "split": [split for split, _ in rows],
            "prompt": [prompt.text for _, prompt in rows],
            "metadata": [canonical_json(dict(prompt.metadata)) for _, prompt in rows],
        }
        write_table(folder / "prompts.parquet", columns, PROMPTS)
        digest = self.workspace.embeddings.digest([prompt.condition for _, prompt in rows])
        (folder / "embeddings.json").write_text(canonical_json({"digest": digest}))
        return Output(rows=len(rows))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Count prompts by split."""
        return {split: len(prompts) for split, prompts in self._prompts.items()}

    @cached_property
    def _prompts(self) -> dict[str, list[Prompt]]:
        return source_prompts(self.config)
