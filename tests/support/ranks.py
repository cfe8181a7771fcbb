"""Ranks of one test, forked from a process that has done nothing but import torch, whatever this one did before."""

from __future__ import annotations

import multiprocessing

RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp"])
