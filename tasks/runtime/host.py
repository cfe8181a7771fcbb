"""The model host: holds all models of a process, with their device, dtype and size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.devices import chosen_device, local_rank, make_current
from flowmill.models.policies.attention import wrong_device
from flowmill.models.policies.base import Policy
from flowmill.models.policies.compute_meter import Meter, peak_flops
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.factory import RewardCache
from flowmill.models.weights.context_parallel import TokenSplit
from flowmill.models.weights.sharding import Sharding
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.weight_sources import Weights, chosen_weights, local_model, weight_files
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.seeds import derive
from flowmill.tasks.runtime.critic import LoadedCritic, fresh_critic
from flowmill.tasks.runtime.devices import free_cached_memory, module_bytes, peak_memory, use_deterministic_kernels
from flowmill.tasks.runtime.hardware_info import computing_facts
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.runtime.renderer import Renderer

#: Key of the policy before an artifact's weights are loaded: the base model, with fresh adapters if any.
_BASE = ("base", "")


class ModelHost:
    """Loads parts of the run's models when a stage needs them, keeps them, and releases unneeded parts."""

    def __init__(self, context: RunContext) -> None:
        """Bind to a run; no model is loaded yet."""
        self.context = context
        self.ranks = Ranks()
        """This process's rank in its group."""
        self.loads: Counter[str] = Counter()
        """Number of times each part of a model was read from its files."""
        self._encoder: Policy | None = None
        self._decoder: Policy | None = None
        self._trainable: Trainable | None = None
        self._holds: tuple[str, str] | None = None
        self.critic = LoadedCritic(context.store, self._fresh_critic)
        """The critic that is trained with the policy, if there is one."""
        self._named: dict[tuple[ArtifactRef, Weights], tuple[str, str]] = {}
        self.renderer = None if context.config.render is None else Renderer(context)
        """The frozen model that renders the policy's texts, if there is one."""
        self.trainer: tuple[ArtifactRef, Any] | None = None
        """The policy that was just trained, and the state that training goes on from in the next epoch."""
        self.idle_modules: tuple[str, ...] = ()  # without a gradient in the last epoch
        self._prepared: frozenset[Part] | None = None
        self._work = ""
        self.rewards = RewardCache(context.contents.fits.located, context.contents.check_reward)
        """Rewards, each created once per process."""
        self._lock = threading.RLock()

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config

    # Device

    @cached_property
    def device(self) -> torch.device:
        """The device of the models; with several devices of a kind, the one of the local rank."""
        return chosen_device(self.config.execution.device, local_rank())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of frozen weights and forwards."""
        return getattr(torch, self.config.model.dtype)  # type: ignore[no-any-return]

    def use_threads(self) -> None:
        """Set torch's CPU threads and device, which torch stores per thread, for this thread, and choose kernels."""
        make_current(self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(self.config.execution.threads)
        elif self.config.execution.deterministic:
            use_deterministic_kernels()

    def loaded(self) -> dict[str, int]:
        """Return the bytes of parameters and buffers of every loaded part."""
        parts: dict[str, Mapping[str, torch.nn.Module]] = {}
        if self._encoder is not None:
            parts["encoder"] = self._encoder.modules()
        if self._decoder is not None:
            parts["decoder"] = self._decoder.modules()
        if self._trainable is not None:
            parts |= {"policy": self._trainable.policy.modules()}
            parts |= {name: modules for name, modules in self._trainable.frozen.items() if modules}
        if self.critic.loaded is not None:
            parts["critic"] = self.critic.loaded.policy.modules()
        sizes = {name: sum(map(module_bytes, modules.values())) for name, modules in parts.items()}
        return sizes if self.renderer is None else {**sizes, Part.RENDERER.value: self.renderer.loaded()}

    def memory(self) -> dict[str, int]:
        """Return the bytes of loaded parts, and the peaks since the last call, see ``peak_memory``."""
        return {**self.loaded(), **peak_memory(self.device)}

    def facts(self) -> dict[str, str]:
        """Return the facts that, in addition to inputs, affect exact results; see ``computing_facts``."""
        return computing_facts(self.device) | ({} if self._trainable is None else self._trainable.policy.facts)

    def computed(self) -> dict[str, float]:
        """Return seconds and FLOPs of denoisers since the last call, and the device's peak FLOP/s, if listed."""
        meter = None if self._trainable is None else self._trainable.policy.meter
        if meter is None:
            return {}
        done, peak = meter.take(), peak_flops(self.device, self.dtype)
        figures = {"model_seconds": round(done.seconds, 4), "model_flops": done.flops, "peak_flops": peak}
        return {name: value for name, value in figures.items() if value is not None}

    # Together with the other ranks

    def meet(self, parts: frozenset[Part], load: Callable[[], None]) -> None:
        """Load the models of a stage on all ranks collectively, if ranks shard the weights."""
        if self.sharding is not None and parts:
            self.prepare(parts)
            load()

    def assemble(self, ref: ArtifactRef, weights: Weights) -> Trainable:
        """Return the policy for sampling; a collective call, which gathers the whole weights on every rank.

        With ``execution.sampling`` "spread" the weights stay sharded, and the ranks sample in step.

        Args:
            ref: a policy artifact.
            weights: the kind of its weights.
        """
        with self._lock:
            trainable = self.trainable(ref, weights)
            if not self.samples_in_step:
                trainable.gather()
            return trainable

    @property
    def samples_in_step(self) -> bool:
        """True if weights stay sharded during sampling: all ranks take part in each forward."""
        return self.sharding is not None and self.config.execution.sampling == "spread"

    def exportable(self, ref: ArtifactRef, weights: Weights) -> Trainable:
        """Return the policy for writing files; a separate unsharded copy if ranks shard the weights."""
        if self.sharding is None:
            return self.trainable(ref, weights)
        copy = self._fresh(spread=False)
        copy.read(weight_files(self.context.store, ref, weights))
        return copy

    # Loading and releasing

    def prepare(self, parts: frozenset[Part], work: str = "") -> None:
        """Make room for a stage: release unneeded encoders and decoders, and an unneeded critic from an accelerator.

        Args:
            parts: the parts of the policy that the stage uses.
            work: the artifact; a change means that the previous stage has ended, so reward models are released.
        """
        with self._lock:
            if self._work != work:
                self._work = work
                if self.rewards.rest():
                    free_cached_memory(self.device)
            if self._prepared == parts:
                return
            self._prepared = parts
            if Part.TEXT not in parts:
                self._encoder = None
            if Part.VAE not in parts:
                self._decoder = None
            if Part.CRITIC not in parts and self.device.type != "cpu":
                self.critic.forget()
            if self.renderer is not None and Part.RENDERER not in parts:
                self.renderer.make_room()
            if self._trainable is not None:
                self._place_decoder(self._trainable.policy)
            free_cached_memory(self.device)

    def release(self) -> None:
        """Release all loaded models."""
        with self._lock:
            in_use = any(each is not None for each in (self._encoder, self._decoder, self._trainable))
            self._encoder = self._decoder = None
            self._trainable = self._holds = self._prepared = self.trainer = None
            self.critic.forget()
            if self.renderer is not None:
                self.renderer.forget()
            if in_use:
                free_cached_memory(self.device)

    def load(self, parts: frozenset[Part], folder: Path | None = None, *, empty: bool = False) -> Policy:
        """Load parts of the base model, or of a model of its family in another folder, from files.

        Args:
            parts: the parts to load.
            folder: the model's folder; None: the base model's.
            empty: make trained modules without weights, for ranks that then read their shards.
        """
        settings = self._family.settings_for(self.config, dtype=self.dtype, device=self.device, empty=empty)
        if folder is None:
            self.context.check_model(self.config.model, "")
        self.loads.update(part.value for part in parts)
        policy = self._family.load(folder or self.context.base_folder, settings, parts, self.config.model.options)
        return policy.computing_dequantized(self.config.model.quantize, parts)

    @property
    def _family(self) -> type[Policy]:
        family: type[Policy] = self.context.plan.family
        return family

    def encoder(self) -> Any:
        """Return a policy with the base model's prompt encoders."""
        with self._lock:
            if self._encoder is None:
                self._encoder = self.load(self._family.parts_to_encode(self.config.model.options))
            return self._encoder

    def decoding(self) -> Policy:
        """Return the decoder of samples: the policy if loaded with its autoencoder, else the autoencoder."""
        with self._lock:
            if self._trainable is not None and self.config.rollout.media.decodes:
                policy: Policy = self._trainable.policy
                return policy
            if self._decoder is None:
                self._decoder = self.load(frozenset({Part.VAE}))
            return self._decoder

    def trainable(self, ref: ArtifactRef, weights: Weights = Weights.TRAINED) -> Trainable:
        """Return the policy with the weights of an artifact; denoiser and autoencoder are loaded once per process."""
        with self._lock:
            model, names = self._loaded(), self._names(ref, weights)
            if self._holds != names:
                # Gathered weights are a copy: ranks gather and shard collectively.
                gathered = model.gathered
                model.scatter()
                model.read(weight_files(self.context.store, ref, weights))
                self._holds = names
                if gathered:
                    model.gather()
            return model

    def borrow(self, ref: ArtifactRef) -> Trainable:
        """Return the policy with the trained weights of an artifact for training; it then belongs to no artifact."""
        model = self.trainable(ref)
        model.scatter()
        self._holds = None
        return model

    def keep(self, ref: ArtifactRef) -> None:
        """Record that the borrowed policy now holds the trained weights of an artifact."""
        self._holds = (str(ref), Weights.TRAINED.value)
        self.critic.keep(ref)

    def _fresh_critic(self) -> Trainable:
        self.loads.update([Part.CRITIC.value])
        return fresh_critic(self.context, self.device, self.sharding)

    def starting_weights(self, ref: ArtifactRef) -> list[torch.Tensor]:
        """Return the trained parameters of a policy artifact in parameter order, as copies."""
        return self.stored_weights(weight_files(self.context.store, ref, Weights.TRAINED))

    def stored_weights(self, files: Sequence[Path] | None) -> list[torch.Tensor]:
        """Return stored parameters in parameter order, as copies; with None those of the base model."""
        assert self._trainable is not None
        values = {name: torch.empty_like(p.detach()) for name, p in self._trainable.named_parameters()}
        self._trainable.fill(values, files)
        return list(values.values())

    def fresh(self) -> Trainable:
        """Return the policy before any training."""
        with self._lock:
            model = self._loaded()
            return model if self._holds == _BASE else self._fresh()

    def give_reference(self, trainable: Trainable) -> None:
        """Load the reference, unless it is loaded: the policy that the run starts from, else the base model."""
        trainable.give_reference(self._denoisers, self.context.start_files)

    def give_teacher(self, trainable: Trainable, folder: str, name: str = "") -> None:
        """Load the frozen denoisers of another model of the family, unless they are already loaded."""
        if name not in trainable.teachers:
            self.context.contents.check_algorithm()
            trainable.set_teacher(self._denoisers(local_model(folder, None)), name)

    def _denoisers(self, folder: Path | None = None) -> Policy:
        """Return further denoisers; without weights if the policy is sharded."""
        return self.load(frozenset({Part.DENOISER}), folder, empty=self.sharding is not None)

    def _names(self, ref: ArtifactRef, weights: Weights) -> tuple[str, str]:
        """Return the key of some weights, cached because artifacts never change."""
        if (ref, weights) not in self._named:
            chosen = chosen_weights(self.context.store, ref, weights)
            self._named[ref, weights] = _BASE if chosen is None else (str(ref), chosen.value)
        return self._named[ref, weights]

    def _loaded(self) -> Trainable:
        if self._trainable is None:
            self._trainable, self._holds = self._fresh(), _BASE
        return self._trainable

    def _fresh(self, *, spread: bool = True) -> Trainable:
        """Return a policy from its files, with fresh adapters if any; sharded over the ranks if configured."""
        sharding, name = self.sharding if spread else None, self.config.model.attention
        backend = self._family.attentions.get(name or "")
        if backend is not None and (reason := wrong_device(backend, self.device.type)):
            raise ConfigError(f"model.attention is '{name}', but {reason}. Remove it, or run where there is one.")
        policy = self.load(self._family.trained_parts(self.config), empty=sharding is not None)
        self._place_decoder(policy)
        seed = derive(self.config.run.seed, "lora")
        trainable: Trainable = policy.trainable(self.context.plan.lora, seed=seed)
        if sharding is not None:
            trainable.shard(sharding)
        share = 1 / self.config.execution.context_parallel
        trainable.measure(Meter(adapters=trainable.lora is not None, device=self.device, share=share))
        return trainable

    def _place_decoder(self, policy: Policy) -> None:
        """Keep an idle decoder in host memory; on a CPU this moves nothing."""
        decodes = self._prepared is None or Part.VAE in self._prepared
        policy.move_decoder(self.device if decodes else torch.device("cpu"))

    @cached_property
    def sharding(self) -> Sharding | None:
        """The sharding of weights over the ranks, None if each rank holds them whole."""
        execution = self.config.execution
        if execution.strategy != "fsdp" or self.ranks.world == 1:
            return None
        world, size = self.ranks.world, execution.holders
        return Sharding.over(self.device, world=world, size=size, offload=execution.parameters_in_host)

    @cached_property
    def saving_ranks(self) -> Ranks:
        """The ranks on a separate channel, for checkpoints written during training; the first access is collective."""
        return self.ranks.second_group()

    @cached_property
    def token_split(self) -> TokenSplit | None:
        """The ranks that share the tokens of each row during training, None without context parallelism."""
        degree = self.config.execution.context_parallel
        return None if degree == 1 else TokenSplit.of(self.device, world=self.ranks.world, degree=degree)
