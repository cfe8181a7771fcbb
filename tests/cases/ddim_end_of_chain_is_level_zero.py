"""Stable Diffusion: a chain ends at a noise level above 0, so its latents are shorter than those that are decoded.

(a) ReFL decodes a prediction of clean latents, which is at level 0: it must be decoded as it is.
(b) Algorithms that noise samples again must noise the latents that were decoded and scored.
"""

import os
import sys
import tempfile
import warnings
from types import SimpleNamespace as Holder

warnings.filterwarnings("ignore")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from pathlib import Path

import numpy as np
import torch

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.transitions import Grid
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd15 import SD15
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.algorithms.base import ForwardTimes
from flowmill.tasks.algorithms.diffusion import StateBatch
from flowmill.tasks.algorithms.refl import ReFL
from flowmill.tasks.modalities.diffusion.sample_sets import ForwardSet

STEPS, B = 10, 2
with tempfile.TemporaryDirectory() as folder:
    build_tiny("sd15").save_pretrained(folder)
    policy = SD15.load(Path(folder), DiffusionSettings(height=64, width=64), frozenset(Part), {"steps": STEPS})
rows = policy.encode(["a cat", "two dogs"])
sigmas = policy.sigmas(STEPS)
seen = []
decode = policy.decode_scaled
policy.decode_scaled = lambda latents: (seen.append(latents.detach()), decode(latents))[1]
draw = torch.Generator().manual_seed(0)

# (a) the last state of a chain, K = 1, next to the scheduler's own prediction of clean latents.
level = sigmas[-2].expand(B)
state = torch.randn(B, 4, 8, 8, generator=draw) * 0.7
alpha = policy.pipeline.scheduler.alphas_cumprod
policy.pipeline.scheduler.set_timesteps(STEPS)
last = policy.pipeline.scheduler.timesteps[-1]
a, b = float(alpha[last]) ** 0.5, (1 - float(alpha[last])) ** 0.5
with torch.no_grad():
    noise = policy.pipeline.unet(state * (a + b), last, encoder_hidden_states=rows["prompt_embeds"]).sample
predicted = policy.pipeline.scheduler.step(noise, last, state * (a + b)).pred_original_sample
zeros = torch.zeros(B)
batch = StateBatch(
    latents=state,
    grid=Grid(level, sigmas[-1:].expand(B), sigmas[1:2].expand(B)),
    levels=level[:, None],
    conditioning=Conditioning(rows),
    advantages=zeros,
    weights=zeros + 1,
    units=torch.arange(B),
    importance=zeros + 1,
    count=B,
    age=zeros.long(),
    step=zeros.long(),
    keys=((0, 0), (1, 0)),
    subjects=Holder(draws=(0, 0), prompts=("", "")),
)
models = Holder(
    velocity=lambda rows: policy.velocity(rows.latents, rows.grid.sigma, rows.conditioning),
    rewards_of=lambda latents, rows: policy.decode_smoothly(latents).flatten(1).mean(1),
)
ReFL().loss(batch, models)
refl = float((seen[-1] - predicted).norm() / predicted.norm())

# (b) what a forward-process algorithm gives the UNet, next to a z + b eps of the latents z that are decoded.
final = torch.randn(B, 4, 8, 8, generator=draw)
policy.decoded(final)
scored = seen[-1]
made = ForwardSet.__new__(ForwardSet)
made._times, made._seed, made._gradients, made._about, made.device = (
    ForwardTimes(count=1, kind="grid"),
    0,
    None,
    None,
    torch.device("cpu"),
)
made._condition = lambda ids: Conditioning(rows)
name = [Holder(as_py=lambda n=n: f"s{n}") for n in range(B)]
made.reader = Holder(
    sigmas=[sigmas.numpy()] * B,
    states=[np.array([STEPS])] * B,
    array=lambda kind, n: final[n : n + 1].numpy(),
    sample_ids=name,
    group_ids=name,
    prompt_ids=["p"],
    prompt_rows=np.zeros(B, int),
)
common = {
    key: getattr(batch, key) for key in ("advantages", "weights", "units", "importance", "count", "age", "step", "keys")
}
forward = made.gather(np.array([[0, 0], [1, 0]]), common)
given = []
unet, policy.pipeline.unet.forward = (
    policy.pipeline.unet.forward,
    lambda sample, *args, **more: (given.append(sample), unet(sample, *args, **more))[1],
)
with torch.no_grad():
    policy.velocity(forward.latents, forward.grid.sigma, forward.conditioning)
s = forward.grid.sigma.view(-1, 1, 1, 1)
length = torch.sqrt((1 - s) ** 2 + s**2)
wanted = (1 - s) / length * scored + s / length * forward.noise
# The share of z in what the UNet is given.
rest = given[0] - s / length * forward.noise
share = float((rest * scored).sum() / ((wanted - s / length * forward.noise) * scored).sum())

print(
    f"ReFL decodes latents {refl:.4f} (relative) from the scheduler's own prediction; forward-process rows hold "
    f"{share:.4f} of the latents that were scored (1 is right); the chain ends at level {float(sigmas[-1]):.4f}"
)
sys.exit(0 if refl < 1e-3 and abs(share - 1) < 1e-3 else 1)
