"""Where PPO's loss is clipped, nothing passes: a ratio too large for float32 on the clipped side has gradient 0, not NaN; and
what stands at padding reaches no gradient."""

import sys

import torch

from flowmill.tasks.algorithms.objectives import clipped_surrogate
from flowmill.tasks.algorithms.token_objectives import masked_sum, token_kl

found = {}
x = torch.tensor([[200.0, 0.1]], requires_grad=True)
clipped_surrogate(x, torch.ones(1, 1), (0.2, 0.2)).sum().backward()
found["tokens"] = x.grad.tolist()
x = torch.tensor([200.0], requires_grad=True)
clipped_surrogate(x, torch.ones(1), (0.2, 0.2)).sum().backward()
found["images"] = x.grad.tolist()
x = torch.tensor([[-1.0, -100.0]], requires_grad=True)
kl = token_kl(x, torch.tensor([[-1.5, 0.0]]), "k3")
masked_sum(kl, torch.tensor([[True, False]])).sum().backward()
found["k3 at padding"] = x.grad.tolist()
right = all(torch.tensor(each).isfinite().all() for each in found.values())
print(("ok: " if right else "FAULT: ") + f"gradients {found}")
sys.exit(not right)
