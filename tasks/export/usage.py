"""Usage of an export: the settings as JSON, and as Python code that runs as pasted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.escaping import in_python
from flowmill.models.policies.diffusion import PipelineCall, SchedulerChoice
from flowmill.models.weights.lora_files import LORA_FILE
from flowmill.tasks.export.publish import HERE, HERE_WHOLE

_GUIDER = "ClassifierFreeGuidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Everything needed to reproduce samples of the evaluation with plain diffusers."""

    pipeline: str
    """Class of the pipeline in diffusers."""
    loader: str
    """Class that loads it: a generic one, unless the base's index names another pipeline; blocks of a modular one."""
    base: str | None
    """Hub id or folder of the base model of LoRA files; None for a whole pipeline."""
    revision: str | None
    """Commit of a hub id."""
    missing: tuple[str, ...]
    """Components that the base lacks, which ``from_pretrained`` needs as ``None`` arguments."""
    loras: tuple[str, ...]
    """LoRA files, relative to the export; those of further denoisers are in a folder with the component's name."""
    dtype: str
    call: PipelineCall
    """Arguments and scheduler."""
    prompt: str
    """A prompt of the evaluation."""
    seed: int
    """Seed of its initial noise there."""
    inputs: tuple[str, ...]
    """Files of the prompt's input images, relative to the export; empty for pipelines without input images."""
    fps: int | None
    """Frames per second of clips; None for images."""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON."""
        chosen, call, scheduler = self.call.scheduler, self.call, None
        if chosen is not None:
            scheduler = {"class": chosen.name, "options": dict(chosen.options), "from_config": chosen.from_config}
        return {
            "pipeline": self.pipeline,
            **({} if call.blocks is None else {"blocks": call.blocks, "left_out_blocks": list(call.left_out)}),
            "base_model": self.base,
            "base_revision": self.revision,
            "missing_components": list(self.missing),
            "lora_files": list(self.loras),
            "dtype": self.dtype,
            "scheduler": scheduler,
            **({} if call.guider is None else {"guider": dict(call.guider)}),
            "call": dict(call.arguments),
            **({"vae_tiling": True} if call.vae_tiling else {}),
            **self._prompt_files(),
            "frames_per_second": self.fps,
            "prompt": self.prompt,
            "seed": self.seed,
            "differences": list(call.differences),
        }

    @property
    def ends(self) -> bool:
        """Whether the clip's last frame is an input too."""
        return self.call.last_frame and len(self.inputs) == 2

    def _prompt_files(self) -> dict[str, Any]:
        if self.call.clip:
            return {"input_image": None, "input_video": list(self.inputs)}
        first = {"file": self.inputs[0], "size": self.call.image_size} if self.inputs else None
        if self.ends:
            return {"input_image": first, "last_image": {"file": self.inputs[1], "size": self.call.image_size}}
        further = {"further_input_images": list(self.inputs[1:])} if self.inputs[1:] else {}
        return {"input_image": first, **further}


def lora_files(target: Path) -> tuple[str, ...]:
    """Return the LoRA files below an export, the one in its top folder first."""
    paths = (path.relative_to(target).as_posix() for path in target.rglob(LORA_FILE))
    return tuple(sorted(paths, key=lambda name: (name.count("/"), name)))


def input_names(count: int) -> tuple[str, ...]:
    """Return file names of ``count`` input images, relative to an export."""
    return tuple(f"images/input{'' if number == 0 else f'-{number + 1}'}.png" for number in range(count))


def snippet(usage: Usage) -> str:
    """Return Python code that loads the export and generates the first image of the evaluation."""
    scheduler = usage.call.scheduler
    whole = usage.call.blocks is not None and usage.base is None
    lines = ["import os"] * whole
    lines += ["import torch", f"from diffusers import {_imports(usage)}"]
    lines += ["from diffusers.utils import encode_video"] * usage.call.heard
    lines += ["from PIL import Image"] * bool(usage.inputs)
    lines += ["", f"folder = {HERE_WHOLE if whole else HERE}", *_loading(usage)]
    if scheduler is not None:
        lines += [f"pipe.scheduler = {_scheduler_code(scheduler)}"]
    if usage.call.guider is not None:
        settings = ", ".join(f"{name}={value!r}" for name, value in usage.call.guider.items())
        lines += [f"pipe.guider = {_GUIDER}({settings})"]
    lines += ["pipe.vae.enable_tiling()"] * usage.call.vae_tiling
    lines += ['pipe.to("cuda" if torch.cuda.is_available() else "cpu")', ""]
    lines += [f"prompt = {in_python(usage.prompt)}", *_image_lines(usage)]
    arguments = usage.call.arguments.items()
    written = [f"    {name}={in_python(each) if isinstance(each, str) else repr(each)}," for name, each in arguments]
    lines += ["call = dict(", *written, ")"]
    lines += [f"generator = torch.Generator().manual_seed({usage.seed})"]
    started = "video=video, " if usage.call.clip else "image=image, "
    started += "last_image=last_image, " if usage.ends else ""
    image = started if usage.inputs else ""
    if usage.fps is None:
        lines += [f"result = pipe(prompt=prompt, {image}generator=generator, **call).images[0]"]
        return "\n".join([*lines, 'result.save("result.png")'])
    if usage.call.heard:
        lines += [f'made = pipe(prompt=prompt, {image}generator=generator, output_type="pil", **call)']
        modular = usage.call.blocks is not None
        lines += [f"frames, sound = made.{'videos' if modular else 'frames'}[0], made.audio[0].float().cpu()"]
        lines += [f'about = dict(fps={usage.fps}, output_path="result.mp4")']
        lines += [f"rate = {'made.sampling_rate' if modular else 'pipe.vocoder.config.output_sampling_rate'}"]
        return "\n".join([*lines, "encode_video(frames, audio=sound, audio_sample_rate=rate, **about)"])
    lines += [f'frames = pipe(prompt=prompt, {image}generator=generator, output_type="pil", **call).frames[0]']
    clip = f"save_all=True, append_images=frames[1:], duration={round(1000 / usage.fps)}, lossless=True"
    return "\n".join([*lines, f'frames[0].save("result.webp", {clip})'])


def _loading(usage: Usage) -> list[str]:
    """Return the lines that load a pipeline, and the LoRA files of an export if there are any."""
    place = "folder" if usage.base is None else "base"
    revision = "" if usage.revision is None else f"revision={in_python(usage.revision)}, "
    options = f"{revision}dtype=torch.{usage.dtype}"
    absent = "".join(f", {name}=None" for name in usage.missing)
    lines = [] if usage.base is None else [f"base = {in_python(usage.base)}"]
    if usage.call.blocks is None:
        lines += [f"pipe = {usage.loader}.from_pretrained({place}, {options}{absent})"]
    else:
        lines += [f"blocks = {usage.loader}()"]
        lines += [f"blocks.sub_blocks.pop({in_python(name)})" for name in usage.call.left_out]
        lines += [f"pipe = blocks.init_pipeline({place})", f"pipe.load_components({options})"]
    for name in usage.loras:
        component = name.rpartition("/")[0]
        if not usage.call.loads_adapters:
            lines.append(f"pipe.transformer.load_lora_adapter(folder, weight_name={in_python(name)})")
            continue
        # Not subfolder=: with a local folder diffusers 0.42 then loads the file of the same name in the parent folder.
        other = f", load_into_{component}=True" if component else ""
        lines.append(f"pipe.load_lora_weights(folder, weight_name={in_python(name)}{other})")
    return lines


def _image_lines(usage: Usage) -> list[str]:
    if usage.call.clip:
        named = ", ".join(in_python(name) for name in usage.inputs)
        return [f"frames = [{named}]", 'video = [Image.open(name).convert("RGB") for name in frames]  # the clip']
    size = usage.call.image_size
    scaled = "" if size is None else f".resize({size}, Image.Resampling.LANCZOS)"
    opened = [f'Image.open("{name}").convert("RGB"){scaled}' for name in usage.inputs]
    if usage.ends:
        return [f"image = {opened[0]}  # the first frame", f"last_image = {opened[1]}  # the last frame"]
    if len(opened) < 2:
        return [f"image = {one}  # the image to start from" for one in opened]
    return ["image = [  # the images to start from", *(f"    {one}," for one in opened), "]"]


def _imports(usage: Usage) -> str:
    scheduler = [] if usage.call.scheduler is None else [usage.call.scheduler.name]
    guider = [] if usage.call.guider is None else [_GUIDER]
    return ", ".join(sorted([usage.loader, *scheduler, *guider]))


def _scheduler_code(choice: SchedulerChoice) -> str:
    options = [f"{name}={value!r}" for name, value in choice.options.items()]
    if not choice.from_config:
        return f"{choice.name}({', '.join(options)})"
    return f"{choice.name}.from_config({', '.join(['pipe.scheduler.config', *options])})"
