"""The prompts of a config by split, from lists or from the rows of data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from flowmill.configs.errors import PromptError
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.data_section import data_rows_of
from flowmill.tasks.inputs.prompts import HELD_OUT_ROWS, IMAGE, Prompt, listed_prompts, seen, uses_guidance


def source_prompts(config: RunConfig) -> dict[str, Sequence[Prompt]]:
    """Return the prompts the config names, by split: train, heldout, negative when guidance needs it or rows train
    without a caption, and those of held-out rows of data, if there are some.

    Those of data are read from disk on demand.
    """
    heldout = listed_prompts(config.prompts, "heldout")
    if config.data is not None:
        # Its rows have no held-out prompts.
        train: Sequence[Prompt] = data_rows_of(config).prompts
    else:
        train = listed_prompts(config.prompts, "train")
        _check_held_out(train, heldout)
    apart = config.data is not None and config.data.heldout is not None
    rows = {HELD_OUT_ROWS: data_rows_of(config, heldout=True).prompts} if apart else {}
    texts = [config.model.negative_prompt] if uses_guidance(config) else []
    texts += [""] if config.data is not None and config.data.empty_captions > 0 else []
    negative = [each for text in dict.fromkeys(texts) for each in _of_images(text, train, heldout, *rows.values())]
    return {"train": train, "heldout": heldout, "negative": negative, **rows}


def _check_held_out(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    trained = {seen(prompt): prompt.text for prompt in train} if heldout else {}
    shared = sorted((prompt.text, trained[seen(prompt)]) for prompt in heldout if seen(prompt) in trained)
    if not shared:
        return
    text, like = shared[0]
    written = "" if text == like else f", written {like!r} there"
    raise PromptError(
        f"prompts.heldout: {len(shared)} prompts are in prompts.train too, the first is {text!r}{written}. Their "
        "evaluation would not be of held-out prompts. Remove them from one of the two."
    )


def _of_images(text: str, *splits: Sequence[Prompt]) -> list[Prompt]:
    """Return a prompt, once for each set of start images if prompts have some."""
    images = {prompt.metadata[IMAGE]: prompt.images for prompt in chain(*splits) if prompt.images}
    if not images:
        return [Prompt(text=text)]
    return [Prompt(text=text, metadata={IMAGE: key}, images=paths) for key, paths in images.items()]


def prompts_fingerprint(prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """Return the identity of named lists of prompts, by content and order: the fingerprint of their lists of ids."""
    digest = hashlib.blake2b(digest_size=16)
    for before, split in zip(chain("{", repeat(",")), sorted(prompts), strict=False):
        digest.update(f'{before}"{split}":['.encode())
        for comma, prompt in zip(chain([""], repeat(",")), prompts[split], strict=False):
            digest.update(f'{comma}"{prompt.id}"'.encode())
        digest.update(b"]")
    digest.update(b"}" if prompts else b"{}")
    return digest.hexdigest()
