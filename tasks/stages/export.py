"""Writes the trained policy as files that plain diffusers loads, with a card that says how to call them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from configs.errors import ConfigError
from models.libraries import read_json
from models.policies.base import Part, PipelineCall
from tasks.chain import Node, policy_after
from tasks.components import call_options
from tasks.export.base_model import BaseModel, describe_base, license_identity
from tasks.export.card import About, model_card, prompt_set
from tasks.export.evaluations import Shown, evaluation_figures, evaluation_images, made_evaluation
from tasks.export.files import INDEX, copy_licenses, store_scheduler, write_pipeline
from tasks.export.usage import INPUT, Usage, lora_files
from tasks.pictures import grid
from tasks.prompts import StoredPrompt, read_prompts, uses_guidance
from tasks.seeds import derive
from tasks.sources import PIPELINE, Weights
from tasks.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from models.adapters import Trainable

#: Columns of the picture before and after.
_SHOWN = 6
_PICTURE = "images/before-after.png"


class ExportStage(Stage):
    """A LoRA file for ``load_lora_weights``, or a full pipeline folder for ``from_pretrained``; card and settings."""

    name = "export"
    #: 2: a model card, generation.json and images; LoRA files of sorted keys; pipelines that load without arguments.
    version = 2
    kind = "exports"
    parts = frozenset({Part.DENOISER, Part.VAE})
    # As for base models: a stand-in of a text encoder would have no weights.
    first_rank_only = True

    def options(self) -> Mapping[str, Any]:
        """The format, how the model is called, and what the card tells."""
        config = self.config
        return {
            "format": self._format,
            "average": config.optimize.ema is not None,
            "epoch": self.epoch,
            "model": call_options(config),
            "steps": self._steps,
            "solver": config.evaluate.solver,
            "seed": config.evaluate.seed,
            "samples": config.evaluate.samples,
            "fps": config.rollout.media.fps,
            "algorithm": config.optimize.algorithm.name,
            "prompts": [prompt_set(config.prompts, "train"), prompt_set(config.prompts, "heldout")],
            "rewards": [[section.name, section.slot, section.weight] for section in config.rewards],
            "judges": [section.slot for section in config.evaluate.judges],
            **self._folder_options(),
        }

    def upstream(self) -> tuple[Node, ...]:
        """The policy after the epoch, base model, prompts, and the evaluations before training and after that ran."""
        found = [node for epoch in dict.fromkeys((0, self.epoch)) for node in made_evaluation(self.context, epoch)]
        return (policy_after(self.epoch), Node(0, "base"), Node(0, "preprocess"), *found)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write model, images, settings and card."""
        trainable = self.host.exportable(self.inputs()[0], Weights.AVERAGE)
        target, base = folder / PIPELINE, describe_base(self.context)
        negative = self.config.model.negative_prompt if uses_guidance(self.config) else None
        call = trainable.policy.pipeline_call(self._steps, negative)
        self._write_model(trainable, target, call)
        (target / "images").mkdir()
        picture = self._draw(target / _PICTURE)
        usage = None if call is None else self._usage(trainable, target, base, call)
        if usage is not None:
            (target / "generation.json").write_text(json.dumps(usage.plain(), indent=2, ensure_ascii=False) + "\n")
        (target / "README.md").write_text(model_card(self._about(base, picture), usage))
        return Output(rows=1)

    @property
    def _format(self) -> str:
        chosen, trained = self.config.export.format, "lora" if self.config.model.lora else "full"
        if chosen != "auto" and chosen != trained:
            raise ConfigError(
                f"export.format is '{chosen}', but this run trains {trained} weights. Set it to 'auto' or '{trained}'."
            )
        return trained

    @property
    def _steps(self) -> int:
        return int(self.config.evaluate.steps or self.config.rollout.steps)

    def _folder_options(self) -> Mapping[str, Any]:
        """Return what a card names of a local base model beyond its identity; as recorded where the folder is gone."""
        path, names = self.config.model.path, ("base", "license")
        if path is None:
            return {}
        if not self.context.reads and Path(path).is_dir():
            stated = license_identity(self.context.base_folder)
            return dict(zip(names, (describe_base(self.context).name, stated), strict=True))
        made = self.context.run.made(self.epoch, self.name)
        manifest = self.context.store.manifest(made[-1].ref) if made else None
        return {} if manifest is None else {name: manifest.options[name] for name in names if name in manifest.options}

    def _write_model(self, trainable: Trainable, target: Path, call: PipelineCall | None) -> None:
        base = self.context.base_folder
        if self._format == "lora":
            trainable.policy.save_lora(target)
            copy_licenses(base, target)
            return
        write_pipeline(trainable.policy, base, target)
        if call is not None and call.scheduler is not None:
            store_scheduler(call.scheduler, target)

    def _draw(self, path: Path) -> str | None:
        split = self._split
        before, after = (evaluation_images(self.context, epoch, split, _SHOWN) for epoch in (0, self.epoch))
        if not after:
            return None
        captions = [*(_caption(one, "before") for one in before), *(_caption(one, "after") for one in after)]
        grid([one.media for one in [*before, *after]], captions, columns=len(after)).save(path)
        return _PICTURE

    def _usage(self, trainable: Trainable, target: Path, base: BaseModel, call: PipelineCall) -> Usage:
        lora, config, prompt = self._format == "lora", self.config, self._example
        conditioned = config.prompts.image is not None
        if conditioned:
            self._copy_image(prompt, target / INPUT)
        folder = self.context.base_folder if lora else target
        return Usage(
            pipeline=str(read_json(folder / INDEX)["_class_name"]),
            base=base.name if lora else None,
            revision=base.revision if lora else None,
            missing=trainable.policy.missing_parts(folder),
            loras=lora_files(target) if lora else (),
            dtype=config.model.dtype,
            call=call,
            prompt=prompt.text,
            seed=derive(config.evaluate.seed, "evaluate", prompt.id, 0),
            conditioned=conditioned,
            fps=config.rollout.media.fps if config.model.frames > 1 else None,
        )

    def _about(self, base: BaseModel, picture: str | None) -> About:
        policy, model, prompts = self.inputs()[:3]
        return About(
            config=self.config,
            epoch=self.epoch,
            base=base,
            base_artifact=str(model),
            policy=str(policy),
            digest=self.context.store.require(policy).digest,
            prompts=str(prompts),
            before=evaluation_figures(self.context, 0),
            after=evaluation_figures(self.context, self.epoch),
            picture=picture,
        )

    @property
    def _split(self) -> str:
        return "heldout" if self.context.prompts["heldout"] else "train"

    @property
    def _example(self) -> StoredPrompt:
        return self.context.prompts[self._split][0]

    def _copy_image(self, prompt: StoredPrompt, path: Path) -> None:
        """Write the image that a prompt starts from."""
        section = self.config.prompts
        source = section.heldout if self._split == "heldout" else section.train
        prompts = read_prompts(str(source), section, where=f"prompts.{self._split}")
        found = next(one.image for one in prompts if one.id == prompt.id)
        assert found is not None
        with Image.open(found) as image:
            image.convert("RGB").save(path)


def exported_folder(stage: ExportStage) -> Path:
    """Return the folder of a finished export."""
    store = stage.context.store
    store.require(stage.ref)
    return store.folder(stage.ref, store.shards(stage.ref)[0]) / PIPELINE


def _caption(shown: Shown, when: str) -> tuple[str, str]:
    return shown.prompt, f"{when}: {shown.verdict}"
