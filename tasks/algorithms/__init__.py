"""Algorithms: one small file each.

A new algorithm is one file here with a class that fulfils ``base.Algorithm``, and one line in the table.
"""

from __future__ import annotations

from configs.registry import Table

ALGORITHMS = Table(
    {
        "grpo": "tasks.algorithms.grpo:GRPO",
        "tempflow": "tasks.algorithms.tempflow:TempFlow",
        "grpo_guard": "tasks.algorithms.grpo_guard:GRPOGuard",
        "flow_dppo": "tasks.algorithms.flow_dppo:FlowDPPO",
        "nft": "tasks.algorithms.nft:NFT",
        "awm": "tasks.algorithms.awm:AWM",
        "dpo": "tasks.algorithms.dpo:DPO",
        "dgpo": "tasks.algorithms.dgpo:DGPO",
        "crd": "tasks.algorithms.crd:CRD",
        "opd": "tasks.algorithms.opd:OnPolicyDistillation",
    },
    like="tasks.algorithms.base:Algorithm",
)
