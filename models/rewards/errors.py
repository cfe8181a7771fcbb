"""Error messages of rewards: the prompt, sample and shard, the shapes, and the traceback's file."""

from __future__ import annotations

import os
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowmill.configs.user_directories import user_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of the media of a call."""

    samples: Sequence[str] = ()
    """Sample ids, one per prompt."""
    shard: str = ""
    """Artifact and shard."""

    def take(self, rows: Sequence[int]) -> Origin:
        """Return the origin of rows."""
        return Origin(samples=[self.samples[row] for row in rows] if self.samples else (), shard=self.shard)


class ErrorElsewhere(Exception):
    """An error of a reward in another process, as ``in_short`` says it there."""


def in_short(error: BaseException) -> str:
    """Return type and text of the error that a reward raised, the same for each call: the message around it names the
    file of the traceback."""
    cause = error if error.__cause__ is None else error.__cause__
    return str(cause) if isinstance(cause, ErrorElsewhere) else f"{type(cause).__name__}: {cause}"


def describe(origin: Origin | None, row: int | None, prompts: Sequence[str]) -> str:
    """Return ``prompt '...' (sample ..., shard ...)`` of one row of a call; None: the failure of all rows together."""
    parts = []
    if origin is not None and origin.samples:
        parts.append(f"sample {origin.samples[row or 0]}" if row is not None else f"samples from {origin.samples[0]}")
    if origin is not None and origin.shard:
        parts.append(f"shard {origin.shard}")
    where = f" ({', '.join(parts)})" if parts else ""
    if row is None:
        return f"{len(prompts)} samples together, though for none of them alone{where}"
    return f"prompt {prompts[row]!r}{where}"


def expected(media: np.ndarray) -> str:
    """Return inputs and required result of a reward."""
    images = "(B, F, H, W, 3) clips" if media.ndim == 5 else "(B, H, W, 3) images"
    kind = {np.dtype(np.uint8): images, np.dtype(object): "(B,) texts"}.get(media.dtype, "(B, ...) latents or sounds")
    inputs = f"It was given media of shape {media.shape}, {kind} in {media.dtype}"
    return f"{inputs}, and must return scores of shape ({len(media)},)"


def log_traceback(error: BaseException, name: str, where: str) -> Path:
    """Write an error's traceback to a separate file and return its path. It is in the user's state folder (see
    ``flowmill.configs.user_directories``), or in the system's temporary folder if that is not writable."""
    text = f"reward {name}, {where}\n\n{''.join(traceback.format_exception(error))}"
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    file = f"reward-{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in (user_state() / "logs", Path(tempfile.gettempdir()) / f"flowmill-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The error of a user's own code may be private.
            (folder / file).touch(mode=0o600)
            (folder / file).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return folder / file
    return Path(os.devnull)
