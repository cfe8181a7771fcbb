"""Tiny models of all families, and runs of them: ratios, replay, restarts, and what a forward waits for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowmill.configs.load import load_config
from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from tests.support.families import PIPELINES
from tests.support.inside import prepare, run_epoch, session_of
from tools.gpu.lines import Line, Lines, equal
from tools.gpu.waiting import Waiting

ROOT = Path(__file__).parents[2]
SHORT = ("sd3", "sd15", "wan21")
#: Of a forward of families that ask the device for nothing, and of those that must know a noise range or lengths.
WAITS: Mapping[str, int] = dict.fromkeys(
    ("wan22", "wan22_i2v", "z_image", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "flux3"), 2
) | {
    # Of each half whether there is an image, and twelve choices by masks.
    **dict.fromkeys(("hunyuan_video15", "hunyuan_video15_i2v"), 2 * 13),
    # Of each half how long its text is, and where among its tokens the image's are.
    "qwen_image21": 2 * 14,
}
#: How a run is made again: all families the first way, a few all ways.
_ANEW, _IN_HOST = "that was restarted", "with moments in host memory"
_AGAIN = (_ANEW, _IN_HOST)


def measure(device: torch.device, waiting: Waiting, lines: Lines, *, short: bool) -> None:
    """Add the lines of all families, or of a few."""
    for family in SHORT if short else PIPELINES:
        for dtype in ("bfloat16",) if short else ("bfloat16", "float32"):
            name = f"{family}, {dtype}"
            with lines.told(name), tempfile.TemporaryDirectory() as folder:
                lines += _forwards(family, dtype, device, waiting, Path(folder))
            with lines.told(f"{name}, a run"), tempfile.TemporaryDirectory() as folder:
                lines += _run(family, dtype, device, Path(folder), _ways(family, short=short))


def _ways(family: str, *, short: bool) -> Sequence[str]:
    """Return how a run of a family is made again."""
    every = SHORT[:1] if short else SHORT
    return _AGAIN if family in every else () if short else _AGAIN[:1]


def _forwards(family: str, dtype: str, device: torch.device, waiting: Waiting, folder: Path) -> Iterator[Line]:
    """Yield what a forward waits for, and how far the device is from the CPU."""
    build_tiny(family).save_pretrained(folder)
    there, here = (_policy(family, dtype, where, folder) for where in (device, torch.device("cpu")))
    found = []
    for policy in (there, here):
        found.append(_velocity(policy, family))
    with waiting.counted() as lines_of_code:
        _velocity(there, family, *found[0][1:])
    waits = sum(lines_of_code.values())
    where = "; ".join(lines_of_code) if waits > WAITS.get(family, 0) else ""
    yield Line(
        label=f"{family}, {dtype}: waits of a guided forward {where}".strip(),
        predicted=float(WAITS.get(family, 0)),
        measured=float(waits),
        ok=waits <= WAITS.get(family, 0),
    )
    one, other = (velocity.cpu() for velocity, *_ in found)
    apart = float((one - other).norm() / other.norm())
    yield Line(
        label=f"{family}, {dtype}: velocity against the CPU's, relative",
        measured=apart,
        ok=apart < (0.05 if dtype == "bfloat16" else 1e-3),
    )


def _policy(family: str, dtype: str, device: torch.device, folder: Path) -> DiffusionPolicy:
    settings = DiffusionSettings(
        height=64,
        width=64,
        guidance_scale=4.0,
        dtype=getattr(torch, dtype),
        device=device,
        frames=5 if family.startswith("wan") else 1,
    )
    made: DiffusionPolicy = resolve(POLICIES, family, label="policy").load(folder, settings, frozenset(Part), {})
    return made


@torch.no_grad()
def _velocity(policy: DiffusionPolicy, family: str, *given: Any) -> tuple[Any, ...]:
    """Return a guided velocity, and what it was computed from, to be given again."""
    device = policy.settings.device
    if not given:
        images = [[np.zeros((64, 64, 3), np.uint8)]] if spec_of(family).starts_from != "text" else None
        rows = policy.encode(["a photo"], images)
        latents = policy.initial_latents([torch.Generator().manual_seed(0)])
        given = (latents, torch.tensor([0.5]).to(device), Conditioning(rows, rows))
    return policy.velocity(*given), *given


def _run(family: str, dtype: str, device: torch.device, folder: Path, again: Sequence[str]) -> Iterator[Line]:
    """Yield the ratios of a run's first updates, and whether the same run made otherwise ends in the same digest."""
    digests: dict[str, str] = {}
    for name in ("whole", *again):
        context = prepare(_config(family, dtype, device, folder, name, deterministic=bool(again)))
        remember(context.config)
        run_epoch(context, 1)
        if name == "whole":
            yield from _ratios(context, f"{family}, {dtype}")
        if name == _ANEW:
            context = open_run(context.store.root.uri, context.run.name)
        if again:
            run_epoch(context, 2)
            digests[name] = context.store.require(context.chain.require(2, "optimize").ref).digest
        session_of(context).host.release()
    for name in again:
        same = float(digests[name] == digests["whole"])
        yield equal(f"{family}, {dtype}: digest of a run {name} is the same", 1.0, same)


def _config(
    family: str, dtype: str, device: torch.device, folder: Path, name: str, *, deterministic: bool
) -> RunConfig:
    overrides = [
        f"run.name={name.replace(' ', '-')}",
        f"store.root={folder / name.replace(' ', '-')}",
        f"model.dtype={dtype}",
        f"execution.device={device.type}",
        f"execution.deterministic={str(deterministic).lower()}",
        f"execution.offload={'optimizer' if name == _IN_HOST else 'false'}",
        "model.lora={rank: 4, alpha: 8}",
        # Two shards, as of the preset, of half as many rows.
        "rollout.prompts_per_epoch=2",
        "rollout.groups_per_shard=1",
    ]
    return load_config(ROOT / "configs" / f"tiny_{family}.yaml", overrides)


def _ratios(context: RunContext, name: str) -> Iterator[Line]:
    """Yield the replay gap and the ratios of the first update, which are those of the policy that sampled."""
    records = context.store.records(context.chain.require(1, "optimize").ref)
    first = records[0].summary["updates"][0]
    gap = float(first.get("replay_gap_max", 0.0))
    yield Line(label=f"{name}: largest replay gap of the first update", predicted=0.0, measured=gap, ok=gap < 1e-2)
