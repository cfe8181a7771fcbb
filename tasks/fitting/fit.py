"""``flowmill reward fit``: one artifact of kind ``reward_models`` from judgments, and a copy in a folder."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import Json, fingerprint
from flowmill.configs.model import LoraSection
from flowmill.configs.registry import check_options, create, option_names, resolve
from flowmill.configs.reward_fit import FitConfig
from flowmill.configs.suggestions import did_you_mean
from flowmill.models.devices import chosen_device
from flowmill.models.maths.preferences import expected_preference
from flowmill.models.rewards import BACKBONES
from flowmill.models.rewards.backbones import RewardBackbone, add_adapters
from flowmill.models.rewards.fitted import ABOUT, ADAPTERS, HEAD, PLACES, may_be_chance
from flowmill.models.rewards.latents import layer_tensors
from flowmill.storage import layout
from flowmill.storage.artifacts.checkpoints import clear_checkpoints
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.fit_names import add_fit
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.export.copying import check_new_folder, new_folder
from flowmill.tasks.fitting.figures import card, figures_of_preferences, figures_of_ratings
from flowmill.tasks.fitting.judgments import Judgment, Judgments, read_judgments
from flowmill.tasks.fitting.splits import check_leaks, check_sizes, held_out
from flowmill.tasks.fitting.training import Examples, JudgedInputs, train_head
from flowmill.tasks.inputs.option_paths import content_of, places

#: Version 2: accuracies compare samples of one prompt, and their intervals are over prompts.
_STAGE, _VERSION, _SHARD = "reward_fit", 2, "model"
#: Settings that do not change the result, or count by their content.
_ELSEWHERE = frozenset({"name", "data", "heldout", "store", "device", "checkpoint_every"})
#: Media per call of a backbone.
_STEP = 16
_CARD = "README.md"
#: Files of a reward model; a folder without the first has none.
_FILES = (ABOUT, HEAD, ADAPTERS, _CARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """A committed reward model."""

    ref: ArtifactRef
    folder: Path
    summary: dict[str, Any]
    new: bool
    """Whether it was fitted now."""
    named: str | None
    """The name that runs find it by, NAME@NUMBER, if it has one."""

    @property
    def may_be_chance(self) -> bool:
        """Whether runs refuse it: its accuracy on held-out judgments may be that of a coin."""
        return may_be_chance(self.summary["heldout"]["accuracy"])


def fit_reward(config: FitConfig) -> FittedModel:
    """Return the reward model that a config describes, fitted now if it is not in the store."""
    name, options = config.backbone.name, config.backbone.options
    if name not in BACKBONES:
        raise ConfigError(f"backbone '{name}' does not exist. {did_you_mean(name, BACKBONES)}")
    kind = resolve(BACKBONES, name, label="backbone")
    check_options(kind, name, options, label="backbone")
    store = ArtifactStore(config.store)
    all_rows = read_judgments(config.data, kind.judged, scale=config.scale, store=store)
    apart = _split(config, all_rows, kind.judged, store)
    settings = {**config.fingerprinted(_ELSEWHERE), "contents": _contents(config)}
    judgments: list[Json] = [
        [row.prompt, *row.items, row.value, row.rater, row.source, out]
        for row, out in zip(all_rows.rows, apart, strict=True)
    ]
    work: dict[str, Json] = {"stage": _STAGE, "version": _VERSION, "options": settings, "judgments": judgments}
    ref = ArtifactRef("reward_models", fingerprint(work))
    new = store.manifest(ref) is None

    def write(folder: Path) -> tuple[int, dict[str, Any]]:
        description = _write(folder, config, all_rows, apart, store, ref)
        return len(all_rows.rows), {"accuracy": description["heldout"]["accuracy"]["mean"], **description["data"]}

    number = None if config.name is None else add_fit(store, config.name, ref)
    inputs = tuple(sorted(map(str, all_rows.inputs)))
    store.make(ref, _SHARD, write, stage=_STAGE, stage_version=_VERSION, options=settings, inputs=inputs)
    clear_checkpoints(store, ref)
    if new:
        store.root.remove(layout.claim(ref))
    folder = store.folder(ref, store.shards(ref)[0])
    description = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    named = None if number is None else f"{config.name}@{number}"
    return FittedModel(ref=ref, folder=folder, summary=description, new=new, named=named)


def _split(config: FitConfig, judgments: Judgments, judged: Any, store: ArtifactStore) -> list[bool]:
    """Return, for each judgment, whether it is held out; those of ``heldout`` are added."""
    if not config.heldout:
        return held_out(judgments.rows, config.share, config.seed, texts=judged == "texts")
    others = read_judgments(config.heldout, judged, scale=config.scale, store=store)
    check_sizes(len(judgments.rows), len(others.rows), "Judge more.")
    if judgments.rated != others.rated:
        raise ConfigError("heldout: its rows are ratings and those of data preferences, or the reverse. Use one kind.")
    check_leaks(judgments.rows, others.rows, texts=judged == "texts")
    apart = [False] * len(judgments.rows) + [True] * len(others.rows)
    judgments.rows += others.rows
    judgments.media |= others.media
    judgments.inputs |= others.inputs
    judgments.equal += others.equal
    return apart


def _contents(config: FitConfig) -> dict[str, str]:
    looked = {place.option: content_of(place, list) for place in places(config.backbone, BACKBONES, label="backbone")}
    return {option: content.digest for option, content in looked.items() if content is not None}


def _write(
    folder: Path, config: FitConfig, judgments: Judgments, apart: list[bool], store: ArtifactStore, ref: ArtifactRef
) -> dict[str, Any]:
    """Train, and write weights, description and card into a folder; return the description."""
    device = chosen_device(config.device, label="device")
    name, options = config.backbone.name, dict(config.backbone.options)
    if "device" in option_names(resolve(BACKBONES, name, label="backbone")):
        options["device"] = config.device
    backbone: RewardBackbone = create(BACKBONES, name, options, label="backbone")
    pairs = list(dict.fromkeys((item, row.prompt) for row in judgments.rows for item in row.items))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    adapters = {} if config.lora is None else add_adapters(backbone, name, config.lora, seed=config.seed)
    samples = [(judgments.media[item], prompt) for item, prompt in pairs]
    inputs = _inputs(backbone, samples, device, computed=bool(adapters))

    def examples(out: bool) -> Examples:
        rows = [row for row, each in zip(judgments.rows, apart, strict=True) if each == out]
        items = torch.tensor([[numbers[item, row.prompt] for item in row.items] for row in rows])
        return Examples(items=items.to(device), values=torch.tensor([row.value for row in rows]).to(device))

    heldout, rows = examples(True), [row for row, out in zip(judgments.rows, apart, strict=True) if out]
    # Judgments that measure nothing are refused before any training.
    _figures(rows, heldout, None, torch.zeros(len(pairs), device=device), config.seed)
    place: dict[str, Any] = {"store": store, "ref": ref}
    fit, curve = train_head(backbone, inputs, examples(False), heldout, config, adapters=adapters, **place)
    tie = None if fit.log_tie is None else fit.log_tie.detach()
    description = {
        "backbone": {"name": name, "options": {key: value for key, value in options.items() if key not in PLACES}},
        "data": _counted(judgments, apart, backbone.judged),
        "ties": None if tie is None else {"log_nu": tie.item()},
        "heldout": _figures(rows, heldout, tie, fit.scores(), config.seed),
        "curve": curve,
        **({} if config.lora is None else _adapter_description(config.lora, adapters, fit.layers)),
    }
    save_file(layer_tensors(fit.layers), folder / HEAD)
    if adapters:
        save_file({each: tensor.detach().cpu() for each, tensor in adapters.items()}, folder / ADAPTERS)
    (folder / ABOUT).write_text(json.dumps(description, indent=1, sort_keys=True, ensure_ascii=False), encoding="utf-8")
    (folder / _CARD).write_text(card(description), encoding="utf-8")
    return description


def _inputs(
    backbone: RewardBackbone, pairs: list[tuple[Any, str]], device: torch.device, *, computed: bool
) -> JudgedInputs:
    """Return the inputs of media and their prompts: in memory, or computed in each call, for adapters that change."""
    media, prompts = map(list, zip(*pairs, strict=True))
    numbers = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}

    def compute(rows: torch.Tensor) -> torch.Tensor:
        places = rows.tolist()
        return backbone.inputs([media[each] for each in places], [prompts[each] for each in places]).to(device)

    of = compute if computed else torch.cat([*map(compute, torch.arange(len(media)).split(_STEP))]).__getitem__
    return JudgedInputs(
        of=of,
        computed=_STEP if computed else None,
        prompts=torch.tensor([numbers[prompt] for prompt in prompts], device=device),
        shares=backbone.shares(list(numbers)).to(device),
    )


def _adapter_description(lora: LoraSection, adapters: Mapping[str, nn.Parameter], head: nn.Module) -> dict[str, Any]:
    """Return rank, scale and layers of adapters, and the numbers of trained parameters."""
    targets = lora.targets or sorted({name.partition(".lora_")[0] for name in adapters})
    sizes = {"adapters": adapters.values(), "head": head.parameters()}
    trained = {name: sum(each.numel() for each in parameters) for name, parameters in sizes.items()}
    return {"lora": {"rank": lora.rank, "alpha": lora.alpha, "targets": list(targets)}, "trained": trained}


def _figures(
    rows: list[Judgment], heldout: Examples, log_tie: torch.Tensor | None, scores: torch.Tensor, seed: int
) -> dict[str, Any]:
    if heldout.rated:
        return figures_of_ratings(rows, scores[heldout.items[:, 0]].double().cpu().numpy(), seed)
    difference = heldout.difference(scores)
    expected = expected_preference(difference, log_tie)
    return figures_of_preferences(rows, difference.double().cpu().numpy(), expected.double().cpu().numpy())


def _counted(judgments: Judgments, apart: list[bool], judged: str) -> dict[str, Any]:
    return {
        "kind": "ratings" if judgments.rated else "preferences",
        "judged": judged,
        "train": len(apart) - sum(apart),
        "heldout": sum(apart),
        "prompts": len({row.prompt for row in judgments.rows}),
        "media": len(judgments.media),
        "sources": dict(sorted(Counter(row.source for row in judgments.rows).items())),
        **({"equal": judgments.equal} if judgments.equal else {}),
    }


def check_copy(to: Path) -> None:
    """Check that a reward model can be copied into a folder, before it is fitted."""
    check_new_folder(to, over=_FILES)


def copy_model(model: FittedModel, to: Path) -> None:
    """Copy a reward model into a folder, in place of an earlier copy there."""
    with new_folder(to, over=_FILES) as folder:
        for file in model.folder.iterdir():
            shutil.copyfile(file, folder / file.name)
