"""Rollouts whose chains a server draws: proved before, compared after, with log-probs that are computed here.

Legend: B rows of a batch, T steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from flowmill.configs.errors import EngineError
from flowmill.models.engines.chains import ChainEngine, ChainRequest, ChainServer, DenoisingChain, Drawing
from flowmill.models.maths.sampling import Rollout, grid_at, rescore
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.components import make_solver
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.diffusion.engine_calls import (
    call_of,
    checked_step,
    proof_of,
    step_gap,
    stored_states,
    weights_of,
)
from flowmill.tasks.modalities.diffusion.rollout_sampling import ChainBatch, RolloutSampler
from flowmill.tasks.modalities.samplers import SampleRequest, SamplingContext, WorksAhead

#: Relative distance of velocities above which rounding is not the cause. Kernels of another library round otherwise;
#: with TF32 a float32 product has the fraction of float16.
_TOLERANCE, _ROUNDED = 1e-3, 0.05
_AGAIN = "Nothing of this batch was stored, committed results stay: give the same command again."


class EngineSampler(RolloutSampler, WorksAhead):
    """Makes the samples of an epoch from chains of an engine."""

    def __init__(self, making: SamplingContext, engine: ChainEngine) -> None:
        """Bind to the sampling context and the engine; no request is sent yet."""
        super().__init__(making)
        self._engine = engine
        # The check of a server's weights is a forward in the thread that calls it.
        self._lock = threading.Lock()

    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        return next(self.each([jobs]))

    def each(self, parts: Sequence[Sequence[SampleRequest]]) -> Iterator[list[Sample]]:
        """Yield the samples of batches, in order: the server draws the next ones while the first is computed here."""
        waiting, server = iter(parts), self._server
        drawn: deque[tuple[ChainBatch, Future[list[DenoisingChain]]]] = deque()
        threads = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        try:
            while True:
                for jobs in islice(waiting, 2 - len(drawn)):
                    batch = self._batch(jobs)
                    drawn.append((batch, threads.submit(server.chains, self._chains(batch))))
                if not drawn:
                    return
                batch, future = drawn.popleft()
                chains = future.result()
                with self._lock:
                    samples = self.finished(batch, self.rescored(batch, chains))
                yield samples
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _chains(self, batch: ChainBatch) -> list[ChainRequest]:
        """Return the chains of a batch, without copies."""
        steps, solver = self._config.rollout.steps, self._config.rollout.solver
        return [
            ChainRequest(
                prompt=job.prompt.text,
                seed=seed,
                stochastic=plan.stochastic,
                trained=plan.trained,
                states=stored_states(plan, checked_step(plan, steps, solver), steps),
            )
            for job, seed, plan in zip(batch.jobs, batch.seeds, batch.plans, strict=False)
        ]

    def rescored(self, batch: ChainBatch, chains: Sequence[DenoisingChain]) -> Rollout:
        """Return the log-probs of chains as the policy in this process computes them."""
        padded = [*chains, *[chains[-1]] * (len(batch.padded) - len(chains))]
        latents = torch.nn.utils.rnn.pad_sequence([chain.latents for chain in padded], batch_first=True)
        latents, states = latents.to(self._making.host.device), [chain.states for chain in padded]
        rollout = rescore(
            batch.velocities,
            batch.conditioning,
            latents,
            states,
            batch.sigmas,
            sampler=self._sampler(batch.policy, batch.velocities),
            plans=batch.plans,
        )
        self._check_log_probs(batch, chains, rollout)
        self._check_step(batch, latents, states)
        return rollout

    def _check_log_probs(self, batch: ChainBatch, chains: Sequence[DenoisingChain], rollout: Rollout) -> None:
        rows = zip(chains, batch.plans, rollout.log_probs.cpu(), strict=False)
        gaps = torch.cat([(chain.log_probs[list(plan.trained)] - own).abs() for chain, plan, own in rows])
        limit = self._engine.log_prob_tolerance
        if len(gaps) and not float(gaps.mean()) <= limit:
            raise EngineError(
                f"rollout.engine: over {len(gaps)} drawn steps its log-probs are {float(gaps.mean()):.3g} per latent "
                f"from the policy's (at most {float(gaps.max()):.3g}), more than its option 'log_prob_tolerance', "
                f"{limit:g}: it drew with other weights, or with another sampler than rollout.sampler. {_AGAIN}"
            )

    def _check_step(self, batch: ChainBatch, latents: Tensor, states: Sequence[Sequence[int]]) -> None:
        """Compare a step without noise of every chain with the policy's."""
        steps, solver = self._config.rollout.steps, self._config.rollout.solver
        checked = [checked_step(plan, steps, solver) for plan in batch.plans]
        compared = [step for step in checked if step is not None]
        if len(compared) < len(checked):
            return
        at = [row.index(step) for row, step in zip(states, compared, strict=True)]
        start, end = (torch.stack([latents[row, place + n] for row, place in enumerate(at)]) for n in (0, 1))
        gaps = self._gaps(batch, start, end, torch.tensor(compared))
        if not float(gaps.max()) <= self._tolerance:
            raise EngineError(
                f"rollout.engine: a step that it drew is {float(gaps.max()):.3g} from the policy's, relative to its "
                f"length, more than its option 'tolerance', {self._tolerance:g}: its weights changed while it drew, "
                f"or it rounds otherwise. {_AGAIN}"
            )

    def _gaps(self, batch: ChainBatch, start: Tensor, end: Tensor, steps: Tensor) -> Tensor:
        """Return the relative distances of (B, ...) latents from the policy's own step, (B,)."""
        with torch.no_grad():
            grid = grid_at(batch.sigmas, steps.to(start.device))
            velocity = batch.velocities.velocity(start, grid.sigma, batch.conditioning)
            own = make_solver(self._config.rollout.solver, "rollout.solver").advance(start, velocity, grid)
        return step_gap(end, own, start)

    @cached_property
    def _server(self) -> ChainServer:
        """The server, which gets the policy's weights when it first draws."""
        context, host, size = self._making.context, self._making.host, self._config.execution.rollout_batch_size
        prompt = context.prompts["train"][0]
        # Prepared here: the thread that calls the server only computes.
        batch = self._batch([SampleRequest(prompt=prompt, replica=0, name="proof")])
        proof = proof_of(self._config, prompt.text)

        def prove(url: str, chain: DenoisingChain) -> None:
            with self._lock:
                host.use_threads()
                start, end = (each.to(host.device).expand(size, *each.shape) for each in chain.latents)
                gap = float(self._gaps(batch, start, end, torch.zeros(size, dtype=torch.int64))[0])
            if not gap <= self._tolerance:
                raise EngineError(
                    f"rollout.engine at {url} does not have the weights of the policy: from fixed noise, for the first "
                    f"prompt, its first step is {gap:.3g} from the policy's, relative to its length, more than its "
                    f"option 'tolerance', {self._tolerance:g}. Start it with the model, dtype and scheduler of this "
                    f"config, and see that no other program loads weights into it. {_AGAIN}"
                )

        drawing = Drawing(
            call=call_of(self._config, batch.policy),
            weights=weights_of(host, self._making.policy, Weights.BEHAVIOR),
            proof=proof,
            prove=prove,
            rank=host.ranks.rank,
        )
        return self._engine.open(drawing)

    @property
    def _tolerance(self) -> float:
        """Relative distance of velocities up to which chains are accepted."""
        if self._engine.tolerance is not None:
            return self._engine.tolerance
        host = self._making.host
        exact = host.device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"
        return _TOLERANCE if host.dtype == torch.float32 and exact else _ROUNDED
