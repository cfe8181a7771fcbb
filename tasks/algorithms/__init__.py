"""Algorithms: one small file each.

A new algorithm is one file here with a class that implements ``base.Algorithm``, and one line in the table.
"""

from __future__ import annotations

from configs.registry import Table

ALGORITHMS = Table(
    {
        "grpo": "tasks.algorithms.grpo:GRPO",
        "tempflow": "tasks.algorithms.tempflow:TempFlow",
        "flash_grpo": "tasks.algorithms.flash_grpo:FlashGRPO",
        "grpo_guard": "tasks.algorithms.grpo_guard:GRPOGuard",
        "flow_dppo": "tasks.algorithms.flow_dppo:FlowDPPO",
        "nft": "tasks.algorithms.nft:NFT",
        "awm": "tasks.algorithms.awm:AWM",
        "v_grpo": "tasks.algorithms.v_grpo:VGRPO",
        "dpo": "tasks.algorithms.dpo:DPO",
        "kto": "tasks.algorithms.kto:KTO",
        "sft": "tasks.algorithms.sft:SFT",
        "dgpo": "tasks.algorithms.dgpo:DGPO",
        "crd": "tasks.algorithms.crd:CRD",
        "ram": "tasks.algorithms.ram:RAM",
        "fdfo": "tasks.algorithms.fdfo:FDFO",
        "reward_gradient": "tasks.algorithms.reward_gradient:RewardGradient",
        "refl": "tasks.algorithms.refl:ReFL",
        "direct_align": "tasks.algorithms.direct_align:DirectAlign",
        "opd": "tasks.algorithms.opd:OnPolicyDistillation",
    },
    like="tasks.algorithms.base:Algorithm",
)

#: Algorithms of causal language models. The kind of the run's policy selects the table, so names may repeat.
TOKEN_ALGORITHMS = Table(
    {
        "grpo": "tasks.algorithms.token_grpo:TokenGRPO",
        "dapo": "tasks.algorithms.token_grpo:DAPO",
        "gspo": "tasks.algorithms.token_grpo:GSPO",
        "cispo": "tasks.algorithms.token_grpo:CISPO",
        "dr_grpo": "tasks.algorithms.token_grpo:DrGRPO",
        "rloo": "tasks.algorithms.token_grpo:RLOO",
        "dpo": "tasks.algorithms.token_dpo:TokenDPO",
        "kto": "tasks.algorithms.token_kto:TokenKTO",
        "sft": "tasks.algorithms.token_sft:TokenSFT",
        "ppo": "tasks.algorithms.ppo:PPO",
        "reinforce_plus_plus": "tasks.algorithms.ppo:ReinforcePP",
    },
    like="tasks.algorithms.base:Algorithm",
)

_BY_KIND = {"tokens": TOKEN_ALGORITHMS, "image_tokens": TOKEN_ALGORITHMS}


def algorithms_of(kind: str) -> Table:
    """Return the algorithms of a kind of policy; custom kinds use import strings instead of table names."""
    return _BY_KIND.get(kind, ALGORITHMS)
