"""The kinds of policies that stages sample, train and show: one room each.

Stages, the training loop, stores and reports ask a kind and never which one it is. What a kind adds to the identity of
artifacts is ``tasks.specs.modalities``'s. A new kind is a folder here, an identity there, and a line in both tables;
one of your own is a class with the methods of both, named in ``model.kind``.
"""

from __future__ import annotations

from configs.registry import Table

KINDS = Table(
    {
        "diffusion": "tasks.modalities.diffusion.modality:Diffusion",
        "tokens": "tasks.modalities.tokens.modality:Tokens",
    },
    like="tasks.modalities.modality:Kind",
)
