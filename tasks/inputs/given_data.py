"""The rows of given data that a config names, those to train on and those that are held out."""

from __future__ import annotations

import os
from functools import lru_cache

from configs.data import DataSection, HeldOutSection
from configs.errors import DataError
from configs.schema import RunConfig
from tasks.inputs.data_rows import GivenData, contents_of, read_given
from tasks.inputs.data_sources import source_files
from tasks.inputs.prompts import Seen, listed_prompts, seen


def data_of(config: RunConfig) -> DataSection:
    """Return the section of given data.

    Raises:
        DataError: there is none.
    """
    if config.data is None:
        raise DataError("The config has no section 'data', so there are no given samples. Add it.")
    return config.data


def given_data(config: RunConfig, *, heldout: bool = False) -> GivenData:
    """Return the rows that a config names; one command reads them several times, so the last ones stay on disk.

    Args:
        config: it has a section ``data``.
        heldout: return those of ``data.heldout``, of which no prompt and no sample is among the others.

    Raises:
        DataError: the source cannot be read, a row cannot be used and ``bad_rows`` is 'stop', or none is left.
    """
    section, prompts, apart = data_of(config), frozenset[Seen](), frozenset[str | Seen]()
    if heldout:
        section = HeldOutSection.model_validate({**section.model_dump(), "train": section.heldout})
    else:
        prompts = frozenset(seen(prompt) for prompt in listed_prompts(config.prompts, "heldout"))
        others = [] if section.heldout is None else given_data(config, heldout=True).rows
        apart = frozenset(content for row in others for content in contents_of(row))
    stats = ((path, path.stat()) for path in source_files(section.train))
    stamps = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    # A forked process must not share the open database.
    return _unchanged(type(section), section.model_dump_json(), stamps, prompts, apart, os.getpid())


@lru_cache(maxsize=4)
def _unchanged(
    kind: type[DataSection],
    section: str,
    stamps: tuple[tuple[str, int, int], ...],
    heldout: frozenset[Seen],
    apart: frozenset[str | Seen],
    process: int,
) -> GivenData:
    return read_given(kind.model_validate_json(section), heldout, apart)


def given_per_epoch(config: RunConfig) -> int:
    """Return the number of given samples that an epoch trains on, at most.

    Raises:
        DataError: the rows cannot be used.
    """
    section, rows = data_of(config), len(given_data(config).rows)
    return min(rows, section.groups_per_epoch or rows) * (2 if section.paired else 1)


def given_heldout(config: RunConfig) -> int:
    """Return the number of held-out samples of given data, 0 without any.

    Raises:
        DataError: the rows cannot be used.
    """
    section = config.data
    if section is None or section.heldout is None:
        return 0
    return len(given_data(config, heldout=True).rows) * (2 if section.paired else 1)
