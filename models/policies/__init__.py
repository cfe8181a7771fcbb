"""Policies: one adapter per model family.

A new family is one file here with a class derived from ``pipeline.PipelinePolicy`` (or ``base.Policy``), and one entry
of ``flowmill.configs.model_families.FAMILIES``.
"""

from flowmill.configs.model_families import FAMILIES
from flowmill.configs.registry import Table

POLICIES = Table(
    {name: f"flowmill.models.policies.{spec.adapter}" for name, spec in FAMILIES.items()},
    like="flowmill.models.policies.base:Policy",
    removed=dict.fromkeys(("minimax_h3", "minimax_h3_fl2v"), "Clips with sound: choose 'ltx2' or 'ltx2_i2v'."),
)
