"""Exports of diffusion policies: files that plain diffusers loads, with a card on their usage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from flowmill.models.image_files import within
from flowmill.models.policies.diffusion import DiffusionPolicy, PipelineCall
from flowmill.models.policies.pipeline_index import index_file, read_index_file
from flowmill.models.weights.lora import LoraSpec
from flowmill.tasks.export.card import CardContent, model_card
from flowmill.tasks.export.files import copy_licenses, store_guider, store_scheduler, write_pipeline
from flowmill.tasks.export.provenance import data_section
from flowmill.tasks.export.usage import Usage, input_names, lora_files
from flowmill.tasks.inputs.base_model import BaseModel
from flowmill.tasks.inputs.prompts import StoredPrompt, image_column, uses_guidance
from flowmill.tasks.inputs.weight_sources import PIPELINE, Weights
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.metrics.image_grids import grid
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.diffusion.evaluation_sampling import sizes_of
from flowmill.tasks.runs.seeds import derive

if TYPE_CHECKING:
    from flowmill.tasks.modalities.modality import ExportRequest


#: Columns of the before-and-after picture.
_SHOWN = 6
_PICTURE = "images/before-after.png"


class PipelineExport:
    """A LoRA file for ``load_lora_weights``, or a full pipeline folder for ``from_pretrained``; card and settings."""

    def __init__(self, exporting: ExportRequest) -> None:
        self._context, self._config, self._host = exporting.context, exporting.config, exporting.host
        self._epoch, self._lora, self._inputs = exporting.epoch, exporting.format == "lora", exporting.inputs
        self._base = exporting.base

    def write(self, folder: Path) -> None:
        """Write model, images, settings and card."""
        trainable = self._host.exportable(self._inputs[0], Weights.AVERAGE)
        policy = cast(DiffusionPolicy, trainable.policy)
        target, base = folder / PIPELINE, self._base
        negative = self._config.model.negative_prompt if uses_guidance(self._config) else None
        with policy.sized(**sizes_of(self._context.plan.evaluated.config.model)):
            call = policy.pipeline_call(self._steps, negative)
        self._write_model(policy, target, call)
        (target / "images").mkdir()
        picture = self._draw(target / _PICTURE)
        usage = None if call is None else self._usage(policy, target, base, call)
        if usage is not None:
            (target / "generation.json").write_text(json.dumps(usage.plain(), indent=2, ensure_ascii=False) + "\n")
        (target / "README.md").write_text(model_card(self._content(base, picture, trainable.lora), usage))

    @property
    def _steps(self) -> int:
        return int(self._config.evaluate.steps or self._config.rollout.steps)

    def _write_model(self, policy: DiffusionPolicy, target: Path, call: PipelineCall | None) -> None:
        base = self._context.base_folder
        if self._lora:
            policy.save_lora(target)
            copy_licenses(base, target)
            return
        write_pipeline(policy, base, target)
        if call is not None and call.scheduler is not None:
            store_scheduler(call.scheduler, target)
        if call is not None and call.guider is not None:
            store_guider(call.guider, target)

    def _draw(self, path: Path) -> str | None:
        split = self._split
        view = RunView(self._context)
        before, after = (evaluation_images(view, epoch, split, _SHOWN) for epoch in (0, self._epoch))
        if not after:
            return None
        captions = [*(_caption(one, "before") for one in before), *(_caption(one, "after") for one in after)]
        grid([one.media for one in [*before, *after]], captions, columns=len(after)).save(path)
        return _PICTURE

    def _usage(self, policy: DiffusionPolicy, target: Path, base: BaseModel, call: PipelineCall) -> Usage:
        lora, config, prompt = self._lora, self._config, self._example
        inputs = self._copy_images(prompt, target, call) if image_column(config) is not None else ()
        folder = self._context.base_folder if lora else target
        named, needed = str(read_index_file(index_file(folder))["_class_name"]), policy.pipeline_name
        return Usage(
            pipeline=needed or named,
            loader=call.blocks or ("DiffusionPipeline" if needed is None or needed == named else needed),
            base=base.name if lora else None,
            revision=base.revision if lora else None,
            missing=policy.missing_parts(folder),
            loras=lora_files(target) if lora else (),
            dtype=config.model.dtype,
            call=call,
            prompt=prompt.text,
            seed=derive(config.evaluate.seed, "evaluate", prompt.id, 0),
            inputs=inputs,
            fps=config.rollout.media.fps if config.model.makes_clips else None,
        )

    def _content(self, base: BaseModel, picture: str | None, lora: LoraSpec | None) -> CardContent:
        trained, model, prompts = self._inputs
        return CardContent(
            config=self._config,
            epoch=self._epoch,
            base=base,
            base_artifact=str(model),
            policy=str(trained),
            digest=self._context.store.require(trained).digest,
            prompts=str(prompts),
            before=evaluation_figures(self._context.chain, 0),
            after=evaluation_figures(self._context.chain, self._epoch),
            ingested=RunView(self._context).ingested(),
            data=data_section(self._context, self._epoch),
            picture=picture,
            lora=lora,
            start=(self._context.starts_from or {}).get("policy"),
        )

    @property
    def _split(self) -> str:
        return "heldout" if self._context.prompts["heldout"] else "train"

    @property
    def _example(self) -> StoredPrompt:
        return self._context.prompts[self._split][0]

    def _copy_images(self, prompt: StoredPrompt, target: Path, call: PipelineCall) -> tuple[str, ...]:
        """Write a prompt's images, or the frames of its clip, in the size of the pipeline; return their names."""
        (images,) = self._context.references([prompt.metadata], frames=call.clip)
        area = call.image_area
        names = input_names(len(images))
        for name, pixels in zip(names, images, strict=True):
            picture = Image.fromarray(pixels)
            (picture if area is None else within(picture, area)).save(target / name)
        return names


def _caption(shown: Shown, when: str) -> tuple[str, str]:
    return shown.prompt, f"{when}: {shown.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One image or clip of an evaluation."""

    prompt: str
    verdict: str
    """Note and score of the first reward; empty if it has not scored."""
    media: np.ndarray
    """(H, W, 3) or (F, H, W, 3) uint8."""


def evaluation_images(view: RunView, epoch: int, split: str, count: int) -> list[Shown]:
    """Return the first images of a split; empty if the epoch was not evaluated, or samples are not decoded."""
    entry = view.chain.find(epoch, "evaluate")
    if entry is None or view.store.manifest(entry.ref) is None or not view.config.rollout.media.decodes:
        return []
    label, rows = view.config.rewards[0].slot, view.samples(epoch, evaluation=True).to_pylist()
    chosen = [row for row in rows if row["list"] == split][:count]
    media = view.pictures(epoch, [row["sample_id"] for row in chosen], evaluation=True)

    def verdict(row: dict[str, Any]) -> str:
        score = row.get(f"reward.{label}")
        return f"{row.get(f'note.{label}') or ''} {'' if score is None else f'{score:.3g}'}".strip()

    return [Shown(prompt=row["prompt"], verdict=verdict(row), media=media[row["sample_id"]]) for row in chosen]
