"""Direct-Align and SRPO (arXiv 2509.06942; Tencent-Hunyuan/SRPO, ``fastvideo/SRPO.py``): rewards at any noise level.

Final latents x0 get recorded noise, x = (1 - s) x0 + s eps. One Euler step of the policy leads from s to s_b.
The image recovered with the same noise, x^ = (x + (s_b - s) v - s_b eps) / (1 - s_b), is close to the original at any
noise level: d x^ / d v = (s_b - s) / (1 - s_b). It is decoded and scored.

Without control words the loss maximizes the reward of the prompt at s_b = s - ``step`` (Direct-Align). With control
words, a positive and a negative one drawn for each row, the reward is relative (SRPO). Denoising to s - ``step``
maximizes (1 + k) R(positive prompt) - R(negative prompt). Inverting to s + ``step``, the same step backwards, maximizes
(1 + k) R(negative prompt) - R(positive prompt), which counteracts the negative word's content and the reward's general
biases. The public code has this for rewards that are a cosine of image and prompt, <image, (1 + k) text - text'>. The
form here equals it for such rewards, and is defined for every reward that reads its prompt.

The loss is relu(margin - R), or -R without a margin, averaged over both branches. Here both start from one state, so
one forward gives both. The public code has two states that end at one level, clips images to 0..1, where a clipped
pixel has no gradient, and uses the initial noise of its rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field, PositiveFloat

from flowmill.configs.option_types import PositiveShare
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.climbing import fooled_note, recovered, reward_shortfall
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch, Question
from flowmill.tasks.algorithms.forward import ForwardProcess

if TYPE_CHECKING:
    from torch import Tensor

#: k of a relative reward: at -1 and below, the positive words would count for nothing, or less.
_Weight: TypeAlias = Annotated[float, Field(gt=-1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAlign(ForwardProcess):
    """One forward with gradient per row, and one of decoder and rewards (two with control words)."""

    step: PositiveShare = 0.25
    """|s_b - s|, the size of the policy's step; a level below it leads to 0, the image itself."""
    positive: tuple[str, ...] = ()
    """Control words for desired content; a prompt becomes 'WORD. PROMPT'."""
    negative: tuple[str, ...] = ()
    """Control words for unwanted content."""
    denoising: tuple[_Weight, _Weight] = (0.1, 0.25)
    """k while denoising, at ``times.low`` and ``times.high``; between them it is linear in the level."""
    inverting: tuple[_Weight, _Weight] = (0.3, 0.01)
    """k while inverting."""
    margin: float | None = None
    """Reward above which the loss is 0; None: no such limit."""
    scale: PositiveFloat = 1.0
    """Factor of the loss."""

    def __post_init__(self) -> None:
        if bool(self.positive) != bool(self.negative):
            raise ValueError("one of positive and negative holds control words, but each is compared with the other.")
        times = self.levels()
        if self.positive and (not times.bounded or times.high + self.step >= 1):
            raise ValueError(
                f"control words are set, so that {self.step} (step) is inverted from every level, but times of kind "
                f"{times.kind!r} reach {times.high if times.bounded else 1}; their sum must be below 1."
            )

    def switched_off(self) -> str | None:
        """Return why weights of control words do nothing, if so."""
        default = (tuple(self.denoising), tuple(self.inverting)) == ((0.1, 0.25), (0.3, 0.01))
        idle = not self.positive and not default
        return "denoising and inverting weigh control words, and positive and negative are not set" if idle else None

    @property
    def requires(self) -> Requirements:
        """Requires forward data and the rewards; a KL also the base model or the average."""
        return self.needs(
            levels=self.levels(),
            rewards=2 if self.positive else 1,
            min_group_size=1,
            advantages=False,
            zero_advantages=True,
            notes=(fooled_note("direct_align"),),
        )

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the shortfall of the rewards from the margin, plus a KL if set."""
        rows = expect(batch, ForwardBatch)
        velocity, level = models.velocity(rows), rows.grid.sigma
        clean = recovered(rows.latents, velocity, rows.noise, level, (level - self.step).clamp(min=0))
        if not self.positive:
            rewards = models.rewards_of(clean, rows)
            loss, metrics = reward_shortfall(rewards, self.margin), {"predicted_reward": rewards.detach()}
        else:
            inverted = recovered(rows.latents, velocity, rows.noise, level, level + self.step)
            positive, negative = self._prompts(rows)
            relative = models.rewards_of(clean, rows, self._relative(rows, positive, negative, self.denoising))
            backwards = models.rewards_of(inverted, rows, self._relative(rows, negative, positive, self.inverting))
            loss = (reward_shortfall(relative, self.margin) + reward_shortfall(backwards, self.margin)) / 2
            metrics = {"relative_reward": relative.detach(), "inverted_reward": backwards.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, self.scale * loss, metrics), metrics=metrics)

    def _prompts(self, rows: ForwardBatch) -> tuple[list[str], list[str]]:
        """Return the rows' prompts with a positive word in front, and with a negative one."""
        subjects = rows.subjects
        if subjects is None:
            raise TypeError("direct_align needs the prompts of its rows")
        pairs = [
            divmod(draw % (len(self.positive) * len(self.negative)), len(self.negative)) for draw in subjects.draws
        ]
        positive = [f"{self.positive[one]}. {prompt}" for (one, _), prompt in zip(pairs, subjects.prompts, strict=True)]
        negative = [f"{self.negative[two]}. {prompt}" for (_, two), prompt in zip(pairs, subjects.prompts, strict=True)]
        return positive, negative

    def _relative(
        self, rows: ForwardBatch, towards: list[str], away: list[str], between: tuple[float, float]
    ) -> list[Question]:
        times = self.levels()
        share = (rows.grid.sigma - times.low) / (times.high - times.low)
        k: Tensor = between[0] + (between[1] - between[0]) * share
        return [Question(prompts=towards, factor=1 + k), Question(prompts=away, factor=-k.new_ones(k.shape))]
