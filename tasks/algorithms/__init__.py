"""Algorithms: one small file each.

A new algorithm is one file here with a class that implements ``base.Algorithm``, and one line in the table.
"""

from __future__ import annotations

from flowmill.configs.registry import Table

ALGORITHMS = Table(
    {
        "grpo": "flowmill.tasks.algorithms.grpo:GRPO",
        "tempflow": "flowmill.tasks.algorithms.tempflow:TempFlow",
        "flash_grpo": "flowmill.tasks.algorithms.flash_grpo:FlashGRPO",
        "grpo_guard": "flowmill.tasks.algorithms.grpo_guard:GRPOGuard",
        "flow_dppo": "flowmill.tasks.algorithms.flow_dppo:FlowDPPO",
        "nft": "flowmill.tasks.algorithms.nft:NFT",
        "awm": "flowmill.tasks.algorithms.awm:AWM",
        "v_grpo": "flowmill.tasks.algorithms.v_grpo:VGRPO",
        "dpo": "flowmill.tasks.algorithms.dpo:DPO",
        "kto": "flowmill.tasks.algorithms.kto:KTO",
        "apo_zero": "flowmill.tasks.algorithms.apo_zero:APOZero",
        "sft": "flowmill.tasks.algorithms.sft:SFT",
        "dgpo": "flowmill.tasks.algorithms.dgpo:DGPO",
        "crd": "flowmill.tasks.algorithms.crd:CRD",
        "ram": "flowmill.tasks.algorithms.ram:RAM",
        "fdfo": "flowmill.tasks.algorithms.fdfo:FDFO",
        "reward_gradient": "flowmill.tasks.algorithms.reward_gradient:RewardGradient",
        "refl": "flowmill.tasks.algorithms.refl:ReFL",
        "direct_align": "flowmill.tasks.algorithms.direct_align:DirectAlign",
        "opd": "flowmill.tasks.algorithms.opd:OnPolicyDistillation",
    },
    like="flowmill.tasks.algorithms.base:Algorithm",
)

#: Algorithms of causal language models. The kind of the run's policy selects the table, so names may repeat.
TOKEN_ALGORITHMS = Table(
    {
        "grpo": "flowmill.tasks.algorithms.token_grpo:TokenGRPO",
        "dapo": "flowmill.tasks.algorithms.token_grpo:DAPO",
        "gspo": "flowmill.tasks.algorithms.token_grpo:GSPO",
        "cispo": "flowmill.tasks.algorithms.token_grpo:CISPO",
        "dr_grpo": "flowmill.tasks.algorithms.token_grpo:DrGRPO",
        "rloo": "flowmill.tasks.algorithms.token_grpo:RLOO",
        "dpo": "flowmill.tasks.algorithms.token_dpo:TokenDPO",
        "kto": "flowmill.tasks.algorithms.token_kto:TokenKTO",
        "apo_zero": "flowmill.tasks.algorithms.apo_zero:TokenAPOZero",
        "sft": "flowmill.tasks.algorithms.token_sft:TokenSFT",
        "ppo": "flowmill.tasks.algorithms.ppo:PPO",
        "reinforce_plus_plus": "flowmill.tasks.algorithms.ppo:ReinforcePP",
    },
    like="flowmill.tasks.algorithms.base:Algorithm",
)

_BY_KIND = {"tokens": TOKEN_ALGORITHMS, "image_tokens": TOKEN_ALGORITHMS}


def algorithms_of(kind: str) -> Table:
    """Return the algorithms of a kind of policy; custom kinds use import strings instead of table names."""
    return _BY_KIND.get(kind, ALGORITHMS)
