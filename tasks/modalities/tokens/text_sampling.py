"""Samples texts: an engine draws them, then one forward over whole rows computes the behavior log-probs.

A KV cache, or another program, rounds differently from a forward over the whole row. So the behavior log-probs are
computed as in training, and those of the engine are stored in addition, to report the gap.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from flowmill.models.engines import make_engine
from flowmill.models.engines.base import CompletionRequest, Engine
from flowmill.models.engines.local import LocalEngine
from flowmill.models.maths.generation import Completion, TokenSampling
from flowmill.models.maths.shared_prompts import SharedWidths
from flowmill.models.maths.tokens import Widths
from flowmill.models.policies.causal_lm import CausalLM, TrainableLM
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.renderer import SEEN_KEY
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.samplers import SampleRequest, SamplingContext
from flowmill.tasks.modalities.tokens.exporting import write_model
from flowmill.tasks.modalities.tokens.forwards import forwards
from flowmill.tasks.modalities.tokens.gap import check_gap
from flowmill.tasks.modalities.tokens.run_prompts import RunPrompts, read_prompts
from flowmill.tasks.modalities.tokens.text import FINISHES, Stops, completed_text
from flowmill.tasks.runs.seeds import derive

#: Divides 63-bit seeds to give draws below 1.
_RANGE = float(1 << 63)
#: Tokens of the text that tests an engine's weights.
_PROOF = 128


class TextSampler:
    """Completes prompts with a policy, using some of its weights."""

    def __init__(
        self,
        making: SamplingContext,
        weights: Weights,
        *,
        seed: Callable[[SampleRequest, int], int] | None,
        engine: Engine | None = None,
        copies: int = 1,
    ) -> None:
        """Bind to the sampling context.

        Args:
            making: run and policy.
            weights: the weights of the policy to use.
            seed: (job, position) -> seed of a token's draw; None: the likeliest token.
            engine: draws tokens; None: the policy in this process.
            copies: number of consecutive jobs with the same prompt.
        """
        self._making, self._host, self._weights, self._seed = making, making.host, weights, seed
        self._section, self._copies = tokens_of(making.config), copies
        self._unproved = LocalEngine() if engine is None else engine
        self._brought = self._compared = False

    def load(self) -> None:
        """Load the policy; all ranks must call this together, and the first sends the weights to the engine."""
        self._host.assemble(self._making.policy, self._weights)
        if self._unproved.reloads:
            if self._host.ranks.first:
                self._bring()
            self._host.ranks.gather(None)
            self._brought = True

    def rest(self) -> None:
        """Do nothing: weights are whole while ranks sample."""

    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        """Complete the prompts of some jobs, or their conversations; forwards have a fixed size, padded with copies."""
        finished = {job.name: job.before.sample for job in jobs if job.before and job.before.comment is None}
        due = [job for job in jobs if job.name not in finished]
        if due:
            prompts = [self._context(job) for job in due]
            seeds = [0 if self._seed is None else self._seed(job, _chosen(job)) for job in due]
            completions = self._engine.complete(self._request(due, prompts, seeds))
            masks = [_mask(*each) for each in zip(due, prompts, completions, strict=True)]
            own = self._behavior(due, prompts, completions, masks)
            rows = zip(due, prompts, completions, own, masks, seeds, strict=True)
            samples = [self._sample(*row) for row in rows]
            contents = zip(due, samples, self._contents(completions), strict=True)
            finished |= {job.name: replace(sample, **content) for job, sample, content in contents}
        return [finished[job.name] for job in jobs]

    def _context(self, job: SampleRequest) -> list[int]:
        """Return the ids before a job's next text."""
        if job.before is None:
            return self._read.prompts.of(job.prompt)
        before, read = job.before, self._read
        tokens, comments, seen = before.sample.tokens, read.comments, read.seen
        assert tokens is not None
        assert comments is not None
        assert before.comment is not None
        row = read.with_images(job.prompt.id, tokens, lambda: (job.name, before.sample.metadata))
        images = [] if seen is None else seen.of(job.name, {SEEN_KEY: [before.image]})
        return [*row, *comments.after(tokens.tolist(), before.comment, images)]

    def _contents(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the fields of samples that their completions decode to."""
        tokenizer = self._trainable().policy.tokenizer
        texts = [completed_text(tokenizer, each.ids).encode() for each in completions]
        return [{"text": np.frombuffer(text, np.uint8)} for text in texts]

    @property
    def _size(self) -> int:
        return self._making.config.execution.rollout_batch_size

    def _behavior(
        self,
        jobs: Sequence[SampleRequest],
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        masks: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Return the float32 behavior log-probs of the tokens of ``masks``, of all turns.

        Without ``rescore`` only the first rows are recomputed, to compare them.
        """
        if self._section.rescore:
            whole = self._log_probs(prompts, completions, masks)
            self._check_gap(prompts, completions, whole)
            return [row.numpy()[mask.astype(bool)] for row, mask in zip(whole, masks, strict=True)]
        if not self._compared:
            few = slice(self._making.config.execution.micro_batch_size)
            given = prompts[few], completions[few]
            self._check_gap(*given, self._log_probs(*given, masks[few]))
            self._compared = True
        earlier = [None if job.before is None else job.before.sample.log_probs for job in jobs]
        return [_joined(before, each.log_probs) for before, each in zip(earlier, completions, strict=True)]

    def _log_probs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], masks: Sequence[np.ndarray]
    ) -> list[Tensor]:
        """Return the log-probs of whole rows as training computes them, float32 on the CPU."""
        rows = [(*prompt, *each.ids) for prompt, each in zip(prompts, completions, strict=True)]
        # Results of a row do not depend on other rows, so equal rows are computed once.
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        # Logits of all chosen tokens take many times the memory of sampling.
        size = min(self._size, self._making.config.execution.micro_batch_size)
        firsts: dict[tuple[int, ...], int] = {}
        for row, mask in zip(rows, masks, strict=True):
            firsts[row] = min(firsts.get(row, len(row)), int(mask.argmax()))
        own = _rescored(
            self._trainable(),
            list(places),
            [firsts[row] for row in places],
            self._section.temperature,
            self._host.device,
            size=size,
            widths=self._read.widths,
            shared=self._read.shared,
        )
        return [own[places[row]][: len(row)] for row in rows]

    def _request(
        self, jobs: Sequence[SampleRequest], prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> CompletionRequest:
        policy = self._trainable().policy
        return CompletionRequest(
            prompts=prompts,
            starts=[policy.first_position(prompt) for prompt in prompts],
            sampling=self._sampling,
            stop=self._section.stop,
            vocabulary=policy.vocabulary,
            seeds=seeds,
            forward=policy.next_logits,
            uniforms=None if self._seed is None else self._uniforms(jobs),
            width=self._read.longest,
            size=self._size,
            # A batch may start and end within a group; every conversation differs from the others of its group.
            distinct=self._size if jobs[0].before else min(self._size, -(-self._size // self._copies) + 1),
            device=self._host.device,
        )

    @cached_property
    def _engine(self) -> Engine:
        """The engine, after it has proved that it has the policy's weights."""
        engine = self._unproved
        if engine.tolerance is not None:
            if not self._brought:
                self._bring()
            ids = self._proof()
            widths = Widths(limit=self._trainable().policy.context_length)
            (log_probs,) = _rescored(
                self._trainable(), [ids], [1], 1.0, self._host.device, size=1, widths=widths, shared=None
            )
            engine.prove(ids, log_probs[1 : len(ids)].tolist())
        return engine

    def _bring(self) -> None:
        ref = self._making.policy

        def write(folder: Path) -> None:
            trainable = self._host.exportable(ref, self._weights)
            write_model(cast(CausalLM, trainable.policy), folder, adapters=trainable.lora is not None)

        self._unproved.bring(f"{self._making.context.store.root.uri} {ref}", write)

    def _proof(self) -> list[int]:
        """Return the tokens of the run's first prompts, concatenated and repeated: the same text for all policies."""
        context_length = self._trainable().policy.context_length
        # Leave room for one drawn token, because most servers draw at least one.
        most = _PROOF if context_length is None else min(_PROOF, context_length - 1)
        prompts = self._making.context.prompts["train"][:_PROOF]
        return list(islice((token for prompt in cycle(prompts) for token in self._read.prompts.of(prompt)), most))

    def _check_gap(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], whole: Sequence[Tensor]
    ) -> None:
        starts = [len(prompt) for prompt in prompts]
        own = [row[start:] for row, start in zip(whole, starts, strict=True)]
        check_gap(self._engine, self._trainable().policy, starts, completions, own)

    def _trainable(self) -> TrainableLM:
        return cast(TrainableLM, self._host.trainable(self._making.policy, self._weights))

    @cached_property
    def _read(self) -> RunPrompts:
        return read_prompts(self._making.context, self._trainable().policy)

    @cached_property
    def _sampling(self) -> TokenSampling:
        policy, section = self._trainable().policy, self._section
        stops = Stops.of(policy.tokenizer, section.stop)
        return TokenSampling(
            max_new=section.max_new,
            temperature=section.temperature,
            eos=policy.eos,
            stopped=stops.reached,
            stop_ids=stops.ids,
        )

    def _uniforms(self, jobs: Sequence[SampleRequest]) -> Callable[[int], Tensor]:
        seed = self._seed
        assert seed is not None
        return lambda position: torch.tensor(
            [seed(job, _chosen(job) + position) / _RANGE for job in jobs], dtype=torch.float64
        )

    def _sample(
        self,
        job: SampleRequest,
        prompt: Sequence[int],
        completion: Completion,
        log_probs: np.ndarray,
        mask: np.ndarray,
        seed: int,
    ) -> Sample:
        before = None if job.before is None else job.before.sample
        earlier = None if before is None else before.sampled_log_probs
        ended = [] if before is None or before.finish is None else before.finish.tolist()
        return Sample(
            **job.columns(self._making),
            seed=seed,
            sigmas=(),
            log_probs=log_probs,
            tokens=np.array([*self._read.prompts.stored(prompt), *completion.ids], np.int32),
            token_mask=mask,
            sampled_log_probs=_joined(earlier, completion.log_probs),
            finish=np.array([*ended, FINISHES.index(completion.finish)], np.uint8),
        )


def _chosen(job: SampleRequest) -> int:
    """Return the number of tokens that the policy chose in the turns before, whose draws are not repeated."""
    return 0 if job.before is None else len(job.before.sample.log_probs)


def _mask(job: SampleRequest, prompt: Sequence[int], completion: Completion) -> np.ndarray:
    """Return the mask of chosen tokens of a row: those of the turns before, and those of its completion."""
    mask = np.zeros(len(prompt) + len(completion.ids), np.uint8)
    mask[len(prompt) :] = 1
    if job.before is not None:
        earlier = job.before.sample.token_mask
        assert earlier is not None
        mask[: len(earlier)] = earlier
    return mask


def _joined(earlier: np.ndarray | None, new: Sequence[float]) -> np.ndarray:
    """Return values of chosen tokens after those of the turns before, float32."""
    return np.concatenate([[] if earlier is None else earlier, new]).astype(np.float32)


def rollout_maker(making: SamplingContext, kind: type[TextSampler] = TextSampler) -> TextSampler:
    """Return the sampler of training samples, with a draw per run seed, epoch, prompt, replica and position."""
    run, epoch = making.config.run.seed, making.epoch
    return kind(
        making,
        Weights.BEHAVIOR,
        seed=lambda job, position: derive(run, "token", epoch, job.prompt.id, job.replica, position),
        engine=make_engine(tokens_of(making.config).engine),
        copies=making.config.rollout.group_size,
    )


def evaluation_maker(making: SamplingContext, kind: type[TextSampler] = TextSampler) -> TextSampler:
    """Return the sampler of evaluations: the likeliest tokens, or draws with fixed seeds."""
    seed = making.config.evaluate.seed
    greedy = tokens_of(making.config).evaluate == "greedy"
    drawn = lambda job, position: derive(seed, "evaluate", job.prompt.id, job.replica, position)  # noqa: E731
    return kind(making, Weights.AVERAGE, seed=None if greedy else drawn)


@torch.no_grad()
def _rescored(
    trainable: TrainableLM,
    rows: Sequence[Sequence[int]],
    prompts: Sequence[int],
    temperature: float,
    device: torch.device,
    *,
    size: int,
    widths: Widths,
    shared: SharedWidths | None,
) -> list[Tensor]:
    """Return the (W,) log-probs of each whole row, as training computes them; see ``forwards``."""
    by_number: dict[int, Tensor] = {}
    for numbers, ids, used in forwards(rows, prompts, device, size=size, widths=widths, shared=shared):
        log_probs = trainable.log_probs(ids, temperature, used)[0].cpu()
        by_number |= dict(zip(numbers, log_probs, strict=True))
    return [by_number[number] for number in range(len(rows))]
