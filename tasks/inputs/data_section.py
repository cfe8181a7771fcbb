"""The rows of data that a config names, those to train on and those that are held out."""

from __future__ import annotations

import os
from functools import lru_cache

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.data_rows import DataRows, contents_of, read_data_rows
from flowmill.tasks.inputs.policy_kind import writes_texts
from flowmill.tasks.inputs.prompts import Seen, listed_prompts, seen
from flowmill.tasks.inputs.rows.files import Stamps, stamps_of


def data_of(config: RunConfig) -> DataSection:
    """Return the section of data."""
    if config.data is None:
        raise DataError("The config has no section 'data', so there are no given samples. Add it.")
    return config.data


def data_rows_of(config: RunConfig, *, heldout: bool = False) -> DataRows:
    """Return the rows that a config names; one command reads them several times, so the last ones stay on disk.

    Args:
        config: it has a section ``data``.
        heldout: return those of ``data.heldout``, of which no prompt and no sample is among the others.
    """
    section, prompts, apart = data_of(config), frozenset[Seen](), frozenset[str | Seen]()
    if heldout:
        section = section.heldout_rows()
    else:
        prompts = frozenset(seen(prompt) for prompt in listed_prompts(config.prompts, "heldout"))
        others = [] if section.heldout is None else data_rows_of(config, heldout=True).rows
        apart = frozenset(content for row in others for content in contents_of(row))
    stamps, texts = tuple(stamp for source in sources_of(section) for stamp in stamps_of(source)), writes_texts(config)
    # A forked process must not share the open database.
    return _unchanged((type(section), section.model_dump_json()), stamps, prompts, apart, texts, os.getpid())


def sources_of(section: DataSection) -> list[str]:
    """Return the names of the rows of a section."""
    return [section.train, *([] if section.prior is None else [section.prior.train])]


@lru_cache(maxsize=4)
def _unchanged(
    section: tuple[type[DataSection], str],
    stamps: Stamps,
    heldout: frozenset[Seen],
    apart: frozenset[str | Seen],
    texts: bool,
    process: int,
) -> DataRows:
    kind, values = section
    return read_data_rows(kind.model_validate_json(values), heldout, apart, texts=texts)


def samples_per_epoch(config: RunConfig) -> int:
    """Return the number of samples of data that an epoch trains on, at most."""
    section, data = data_of(config), data_rows_of(config)
    rows = len(data.rows) - data.prior
    count = min(rows, section.groups_per_epoch or rows)
    return (count + min(count, data.prior)) * (2 if section.paired else 1)


def heldout_samples(config: RunConfig) -> int:
    """Return the number of held-out samples of data, 0 without any."""
    section = config.data
    if section is None or section.heldout is None:
        return 0
    return len(data_rows_of(config, heldout=True).rows) * (2 if section.paired else 1)
