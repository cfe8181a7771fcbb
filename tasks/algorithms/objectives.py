"""Loss terms shared by algorithms. Pure: tensors in, tensors out; shapes are (B,) unless stated.

``clip`` is the pair of distances of a clip range's bounds from 1, (low, high): 1 - low to 1 + high.

Legend: B rows, G units (pairs or groups) in a batch, ... latent dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowmill.models.devices import widened
from flowmill.models.maths.transitions import Gaussian, expand, gaussian_kl
from flowmill.tasks.algorithms.ratios import k3_estimate, policy_ratio, ratio_change


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """Return max(-A rho, -A clip(rho, 1 - low, 1 + high)), the PPO loss (arXiv 1707.06347, eq. 7), to minimize.

    The two bounds are DAPO's (arXiv 2503.14476). Tensors have any shapes that broadcast: rows, or tokens of rows.
    """
    ratio, (low, high) = policy_ratio(log_ratio), clip
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def simple_surrogate(log_ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """Return -(A rho - |A| / (2 c) (rho - 1)^2), SPO's loss (arXiv 2401.16025, which has one bound c), to minimize.

    c is high for A > 0 and low for A < 0. At rho = 1 its gradient is that of the clipped loss. Its minimum is at
    1 + high for A > 0 and at 1 - low for A < 0, where the clipped loss starts to clip. Beyond it this loss pulls back,
    while the clipped loss has no gradient. Tensors have any shapes that broadcast.
    """
    ratio, (low, high) = policy_ratio(log_ratio), clip
    bound = torch.where(advantages > 0, torch.full_like(ratio, high), low)
    return -advantages * ratio + advantages.abs() / (2 * bound) * (ratio - 1) ** 2


def ratio_surrogate(kind: str, log_ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """Return the loss of a policy ratio from its logarithm: 'clip' or 'spo'."""
    return (simple_surrogate if kind == "spo" else clipped_surrogate)(log_ratio, advantages, clip)


def ratio_metrics(log_ratio: Tensor, clip: tuple[float, float]) -> dict[str, Tensor]:
    """Return metrics of policy ratios rho: their values, (rho - 1)^2, whether they are clipped, and the k3 estimate
    of KL(old || new) for samples of the old policy; in float64, if the device supports it.
    """
    ratio, change, (low, high) = policy_ratio(log_ratio), ratio_change(log_ratio), clip
    return {
        "ratio": 1 + change,
        "ratio_change_squared": change**2,
        "clip_high": (ratio > 1 + high).float(),
        "clip_low": (ratio < 1 - low).float(),
        "approx_kl": k3_estimate(log_ratio),
    }


def policy_kl(kind: str, new: Gaussian, reference: Gaussian, velocities: tuple[Tensor, Tensor]) -> Tensor:
    """Return a KL to the reference at the same states; 0 if the two steps are equal, never negative.

    Args:
        kind: 'gaussian', the true KL, mean (mu - mu')^2 / (2 std^2), std^2 = s^2 |dt| in an SDE's step (also
            Flow-GRPO's Wan script);
            'flow_grpo', the mean (mu - mu')^2 / (2 s^2) of its image scripts, which omits |dt|; for steps that are not
            an SDE's (cps, ddim) those scripts have only the std, so it equals 'gaussian' there;
            'velocity', mean (v - v')^2 (Flow-Factory's 'v-based'); 'mean', mean (mu - mu')^2 (its 'x-based').
        new: step of the policy.
        reference: step of the reference from the same latents.
        velocities: (B, ...) of policy and reference.
    """
    if kind == "velocity":
        return squared_error(*velocities)
    if kind == "mean":
        return squared_error(new.mean, reference.mean)
    if kind == "flow_grpo" and new.rate is not None:
        return squared_error(new.mean, reference.mean) / (2 * new.rate**2)
    return gaussian_kl(new, reference)


def squared_error(left: Tensor, right: Tensor) -> Tensor:
    """Return the mean squared difference of (B, ...) tensors over all but the first dim."""
    return ((left - right) ** 2).flatten(1).mean(1)


def guarded_log_ratio(log_ratio: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, *, terms: int = 1) -> Tensor:
    """Return GRPO-Guard's S (log rho + b) with b = mean (mu - mu_old)^2 / (2 S^2) and S the step's noise std.

    It equals mean_d xi_d (mu - mu_old)_d with the sampled noise xi, so its mean is 0, while that of log rho is -b.
    Public code: Flow-GRPO ``train_sd3_GRPO_Guard.py``, whose b is one number per batch, reduced over all dims.

    Args:
        log_ratio: (B,) of densities, mean over dims times ``terms``.
        mean: (B, ...) of the policy's step.
        old_mean: (B, ...) of the behavior policy's step.
        std: (B,) of both.
        terms: latent dims if the log-ratio is the sum over them, else 1; the bias is multiplied by it too.
    """
    return std * (log_ratio + terms * squared_error(mean, old_mean) / (2 * std**2))


def divergence_mask(ratio: Tensor, advantages: Tensor, divergence: Tensor, threshold: float) -> Tensor:
    """Return Flow-DPPO's (arXiv 2606.11025) mask: 0 if the step diverged and the row pushes it further away."""
    away = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return (~(away & (divergence >= threshold))).to(ratio.dtype)


def preference(advantages: Tensor, scale: float) -> Tensor:
    """Return clip(A / (2 scale) + 1/2, 0, 1): the weight of 'more of this' (DiffusionNFT's r, with scale 5)."""
    return (advantages / (2 * scale) + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor, behavior: Tensor, state: tuple[Tensor, Tensor, Tensor], weight: Tensor, beta: float
) -> Tensor:
    """Return DiffusionNFT's loss (arXiv 2509.16117, eq. 9; ``train_nft_sd3.py``) without its factor of 5.

    [r L(v+) + (1 - r) L(v-)] / beta with v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v and
    L(u) = ``adaptive_error``.

    Args:
        velocity: (B, ...) of the policy.
        behavior: (B, ...) of the behavior policy.
        state: x_t (B, ...), x0 (B, ...), t (B,).
        weight: r.
        beta: distance of the two implicit policies from the behavior policy.
    """
    latents, clean, time = state
    positive = beta * velocity + (1 - beta) * behavior
    negative = (1 + beta) * behavior - beta * velocity
    losses = [adaptive_error(u, (latents, clean, time)) for u in (positive, negative)]
    return (weight * losses[0] + (1 - weight) * losses[1]) / beta


def awm_log_prob(error: Tensor, time: Tensor, weighting: str, power: float) -> Tensor:
    """Return AWM's pseudo log-prob of the flow-matching error m (Flow-Factory ``trainers/awm.py``).

    In float64, if the device supports it:

    'uniform' -m; 't' -t m; 't2' -t^2 m; 'huber' -(sqrt(m + 1e-10) - 1e-5) t;
    'ghuber' -((m + 1e-10)^p - 1e-10^p) t / p.
    """
    m, t = widened(error), widened(time)
    if weighting == "uniform":
        return -m
    if weighting == "t":
        return -t * m
    if weighting == "t2":
        return -(t**2) * m
    if weighting == "huber":
        return (1e-5 - torch.sqrt(m + 1e-10)) * t
    if weighting == "ghuber":
        return (math.pow(1e-10, power) - torch.pow(m + 1e-10, power)) * t / power
    raise ValueError(f"weighting {weighting!r} is unknown")


def dpo_loss(margin: Tensor, reference_margin: Tensor, beta: float) -> Tensor:
    """Return Diffusion-DPO's loss (arXiv 2311.12908, eq. 14) of pairs, (G,).

    -log sigmoid(-beta / 2 (m - m_ref)), m = error of the winner minus error of the loser at shared noise and level.
    """
    loss: Tensor = -torch.nn.functional.logsigmoid(-0.5 * beta * (margin - reference_margin))
    return loss


def kto_loss(
    gain: Tensor, advantages: Tensor, desired_weight: float, undesired_weight: float, *, point: float = 0.0
) -> Tensor:
    """Return KTO's loss (arXiv 2402.01306, eq. 7) of rows, (B,).

    w (1 - sigmoid(s (gain - point))) with s = 1 for desired rows (A > 0) and -1 for undesired ones; 0 where A = 0.

    Args:
        gain: (B,) implicit reward beta log p / p_ref, or its proxy.
        advantages: (B,) of which only the sign counts.
        desired_weight: w of desired rows.
        undesired_weight: w of undesired rows.
        point: the reference point, in the unit of gains; 0 for APO-zero.
    """
    weight = torch.where(advantages > 0, desired_weight, undesired_weight) * advantages.sign().abs()
    return weight * torch.sigmoid(-advantages.sign() * (gain - point))


def prediction_weight(prediction: str, sigma: Tensor) -> Tensor:
    """Return (B,) weights that turn the squared error of velocities into that of another prediction.

    With flow latents x = (1 - s) x0 + s eps and v = eps - x0, an error d of v is an error (1 - s) d of the noise, -s d
    of x0, and d / (a + b) of v = a eps - b x0 of variance-preserving diffusion; 1 / (a + b)^2 is (1 - s)^2 + s^2.

    Args:
        prediction: "velocity", "epsilon", "sample" or "v_prediction".
        sigma: (B,) noise levels s.
    """
    if prediction == "epsilon":
        return (1 - sigma).square()
    if prediction == "sample":
        return sigma.square()
    if prediction == "v_prediction":
        return (1 - sigma).square() + sigma.square()
    return torch.ones_like(sigma)


def unit_sum(values: Tensor, units: Tensor) -> Tensor:
    """Return, for each row, the sum of (B,) or (B, ...) values over its unit."""
    shape = (int(units.max()) + 1, *values.shape[1:])
    totals = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return totals.index_add(0, units, values)[units]


def pair_sign(advantages: Tensor, units: Tensor) -> Tensor:
    """Return 1 for the better and -1 for the worse row of each pair, 0 for both if their advantages are equal."""
    count = int(units.max()) + 1
    lowest, highest = (
        torch.zeros(count, dtype=advantages.dtype, device=advantages.device).scatter_reduce(
            0, units, advantages, extreme, include_self=False
        )[units]
        for extreme in ("amin", "amax")
    )
    return (advantages == highest).to(advantages.dtype) - (advantages == lowest).to(advantages.dtype)


def loser_share(residuals: Tensor, sign: Tensor, weights: Tensor, units: Tensor, margin: float) -> Tensor:
    """Return Diffusion-SDPO's lambda (arXiv 2511.03317) on worse rows of pairs, 1 on others, without gradient, (B,).

    clip((1 - mu) <e_w, e_w> / <e_w, e_l>, 0, 1) where <e_w, e_l> > 0, else 1: the largest share of the worse sample's
    gradient with which a step still lowers the better sample's error, to first order in the prediction. The public code
    has one lambda for all pairs of a micro-batch, so it depends on the other rows of the batch.

    Args:
        residuals: (B, ...) prediction errors e.
        sign: (B,) 1 for the better, -1 for the worse row of a pair, 0 without a pair.
        weights: (B,) 0 for padding rows.
        units: (B,) pair of each row.
        margin: mu.
    """
    flat, count = widened(residuals.detach()).flatten(1), int(units.max()) + 1

    def summed(mask: Tensor) -> Tensor:
        rows = (mask * weights).to(flat.dtype)[:, None] * flat
        return torch.zeros(count, flat.shape[1], dtype=flat.dtype, device=flat.device).index_add(0, units, rows)

    better, worse = summed(sign > 0), summed(sign < 0)
    own, shared = (better**2).sum(1), (better * worse).sum(1)
    share = torch.where(shared > 0, ((1 - margin) * own / shared).clamp(0, 1), 1.0)
    return torch.where(sign < 0, share[units], 1.0).to(residuals.dtype)


def dgpo_weight(advantages: Tensor, error: Tensor, reference_error: Tensor, units: Tensor, beta: float) -> Tensor:
    """Return DGPO's group weight (Luo-Yihong/DGPO; Flow-Factory ``trainers/dgpo.py``), without gradient.

    sigmoid(sum_g A beta (d - d_ref) / K), the same for all K rows of a group.
    """
    size = unit_sum(torch.ones_like(error), units)
    return torch.sigmoid(unit_sum(advantages * beta * (error - reference_error), units) / size).detach()


def centered(values: Tensor, weights: Tensor, units: Tensor, *, detach: bool = False) -> Tensor:
    """Return values minus their weighted mean over their unit; the weights of a unit sum to 1.

    ``detach`` stops the gradient through the mean, as Flow-Factory does; the result is not the gradient of the loss.
    """
    mean = unit_sum(weights * values, units)
    return values - (mean.detach() if detach else mean)


def unit_uniform(units: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights that are equal within each unit and sum to 1, (B,)."""
    ones = torch.ones(len(units), dtype=dtype, device=units.device)
    return ones / unit_sum(ones, units)


def unit_softmax(values: Tensor, units: Tensor, temperature: float, among: Tensor | None = None) -> Tensor:
    """Return softmax(values / temperature) within units, (B,).

    ``among`` (B,) bool restricts it to some rows; a unit without such rows gets uniform weights.
    """
    logits = values / temperature
    if among is not None:
        logits = logits.masked_fill(~among, -torch.inf)
    count = int(units.max()) + 1
    top = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(0, units, logits, "amax")[units]
    empty = torch.isinf(top)
    raw = torch.exp(logits - torch.where(empty, 0.0, top))
    return torch.where(empty, unit_uniform(units, values.dtype), raw / unit_sum(raw, units))


def adaptive_error(velocity: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return mean (x_t - t v - x0)^2 / w, w = max(mean |x_t - t v - x0|, 1e-5) without gradient, (B,) float64.

    That is t mean e^2 / mean |e| with the flow-matching error e: V-GRPO's surrogate (arXiv 2604.23380).

    Args:
        velocity: (B, ...) v.
        state: x_t (B, ...), x0 (B, ...), t (B,).
    """
    latents, clean, time = state
    difference = widened(latents - expand(time, latents) * velocity) - widened(clean)
    scale = difference.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return (difference**2).flatten(1).mean(1) / scale
