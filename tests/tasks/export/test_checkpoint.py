"""Policies as checkpoints of torch: another program loads what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from flowmill.configs.errors import ConfigError
from flowmill.tasks.export.checkpoint import export_checkpoint
from flowmill.tasks.inputs.weight_sources import OPTIMIZER, Weights
from tests.conftest import ConfigFactory
from tests.support.inside import prepare, run_epoch
from tests.tasks.stages.test_stages import stored

TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(folder: Path, base: Path, *, lora: bool) -> nn.Module:
    """Return diffusers' transformer with what ``dcp.load`` finds, as a program without flowmill does it."""
    transformer = SD3Transformer2DModel.from_pretrained(base / "transformer")
    if lora:
        about = json.loads((folder / "about.json").read_text())["lora"]
        transformer.add_adapter(LoraConfig(r=about["rank"], lora_alpha=about["alpha"], target_modules=about["targets"]))
    parameters = {name: p.detach() for name, p in transformer.named_parameters() if not lora or "lora_" in name}
    dcp.load({"model": {"transformer": parameters}}, checkpoint_id=folder)
    return transformer


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
def test_another_program_loads_what_was_trained(
    make_config: ConfigFactory, tiny_base: Path, tmp_path: Path, lora: bool
) -> None:
    adapted = f"model.lora={{rank: 2, alpha: 4, targets: [{', '.join(TARGETS)}]}}"
    few = ["rollout.prompts_per_epoch=1", "rollout.group_size=2"]
    settings = ["optimize.ema={decay: 0.5}", *few, *([adapted] if lora else [])]
    context = prepare(make_config(*settings))
    if not lora:
        with pytest.raises(ConfigError, match="is the base model itself"):
            export_checkpoint(context, 0, tmp_path / "none")
    run_epoch(context, 1)
    folder = tmp_path / "checkpoint"
    assert export_checkpoint(context, 1, folder) == (["ema", "model", "optim"], [])
    weights, moments = stored(context, 1, Weights.TRAINED.value), stored(context, 1, OPTIMIZER)

    found = dict(loaded(folder, tiny_base, lora=lora).named_parameters())
    assert all(torch.equal(found[name.removeprefix("transformer.")], value) for name, value in weights.items())
    if not lora:
        assert {f"transformer.{name}" for name in found} == weights.keys()
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    whole: dict[str, Any] = torch.load(tmp_path / "all.pt")
    assert whole["model"].keys() == whole["ema"].keys() == weights.keys()
    averages = stored(context, 1, Weights.AVERAGE.value)
    assert all(torch.equal(whole["ema"][name], value) for name, value in averages.items())
    resumed = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(value) for name, value in weights.items()})
    optimizer = torch.optim.AdamW(resumed.values(), lr=1.0)
    state = {name.replace(".", "/"): each for name, each in whole["optim"]["state"].items()}
    (group,) = whole["optim"]["param_groups"]
    group["params"] = [name.replace(".", "/") for name in group["params"]]
    set_optimizer_state_dict(resumed, optimizer, {"state": state, "param_groups": [group]})
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for name, parameter in resumed.items():
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(value.reshape(-1), moments[f"{kind}/{name.replace('/', '.')}"].reshape(-1)), (kind, name)
