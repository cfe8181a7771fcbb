"""Every error flowmill raises on purpose.

    FlowmillError
    ├── ConfigError            a setting, or a combination of settings, that cannot work
    ├── PromptError            a prompt file that cannot be used
    ├── DataError              ingested samples that cannot be used
    ├── TrustError             a store names code or commands that no config here has named
    ├── RunConflictError       a run of this name exists with other settings, or is being executed
    ├── StoreError             the store cannot be used as requested
    │   ├── NotCommittedError  something a stage needs does not exist yet
    │   ├── CorruptError       committed bytes are missing or differ from the commit
    │   └── CommitLostError    another writer committed different bytes first
    ├── DivergedError          training gave numbers that are not finite
    ├── SamplingError          a model gave numbers that are not finite
    ├── EngineError            the engine that samples texts is unreachable, or differs from the policy
    ├── RewardError            a reward failed, or returned something that is no score
    ├── WorkerError            a torchrun worker failed
    ├── TrackingError          a tracker that cannot be used
    ├── PublishError           a repository on the Hub that cannot be written
    ├── StoppedError           an alert whose action is to stop ended the run
    └── CancelledError         the run was cancelled from outside

A message has four parts: place, finding, reason and remedy. The command line prints it alone,
without a traceback.
"""

import errno
import re
from collections.abc import Sequence

#: Address of an object in its text, and the random part of a temporary name.
_ADDRESS = re.compile(r"(?<=[<\[])([^<>\[\]]*?) (?:at|@) 0x[0-9A-Fa-f]+")
_TEMPORARY = re.compile(r"(?<=/tmp)[a-z0-9_]{8}(?![a-z0-9_])")


class FlowmillError(Exception):
    """Base of all errors whose message is written for the user."""


class ConfigError(FlowmillError):
    """A setting, or a combination of settings, that cannot work."""


class PromptError(FlowmillError):
    """A prompt source that is missing, empty, malformed or holds a prompt twice."""


class DataError(FlowmillError):
    """Given samples that are missing, malformed, or cannot be trained on."""


class TrustError(FlowmillError):
    """A store names code or commands that no config on this machine has named."""


class RunConflictError(FlowmillError):
    """A run of this name exists with other settings, or another process is executing it."""


class StoreError(FlowmillError):
    """The store cannot be used as requested."""


class NotCommittedError(StoreError):
    """An artifact that a stage needs has not been committed yet."""


class CorruptError(StoreError):
    """Committed bytes are missing or differ from the commit record."""


class CommitLostError(StoreError):
    """Another writer committed different content for the same shard first."""


class DivergedError(FlowmillError):
    """The loss or gradient of an update is not finite."""


class SamplingError(FlowmillError):
    """A model returned latents, log-probs, embeddings or images that are not finite and cannot be used."""


class EngineError(FlowmillError):
    """The engine that samples texts is unreachable, has other weights than the policy, or gives other log-probs."""


class RewardError(FlowmillError):
    """A reward raised, or returned a missing, non-finite or wrongly shaped score."""


class RewardServiceError(RewardError):
    """The server or endpoint of a reward gives no answer, or no request of this kind can succeed: the cause is no
    sample."""


class WorkerError(FlowmillError):
    """A process started by torchrun failed; the message names the first failing rank."""


class LostRankError(WorkerError):
    """A process started by torchrun was killed from outside: the same work may succeed after a restart."""


class OutOfMemoryError(FlowmillError):
    """A device has too little memory for a stage; the message names remedies."""


class TrackingError(FlowmillError):
    """A tracker that cannot be used."""


class PublishError(FlowmillError):
    """A repository on the Hugging Face Hub cannot be written as requested."""


class StoppedError(FlowmillError):
    """An alert whose action in ``watch.on`` is to stop ended the run; committed data stays."""


class CancelledError(FlowmillError):
    """The run was cancelled from the Prefect UI or API; committed data stays."""


def disk_in_words(error: OSError) -> str:
    """Return an unexpected error of the operating system in words: file, cause, remedy."""
    if error.errno is None:
        return in_words(error)
    places = [str(place) for place in (error.filename, error.filename2) if place is not None]
    where = " and ".join(f"'{place}'" for place in places) or "A file or another program"
    remedy = {
        errno.ENOSPC: "Make room there.",
        errno.EDQUOT: "Make room there.",
        errno.EROFS: "Name a writable location.",
        errno.EACCES: "Name a location that this user may use, or give this user permission.",
        errno.EPERM: "Name a location that this user may use, or give this user permission.",
        errno.EMFILE: "Let a process open more files: ulimit -n.",
        errno.ENAMETOOLONG: "Name something shorter.",
    }
    cause = remedy.get(error.errno, "Fix the cause and give the same command again.")
    return f"{where}: {error.strerror}. {cause} Committed data stays. FLOWMILL_TRACEBACK=1 shows where it happened."


#: Reasons that one message lists.
LISTED = 10


def listed(reasons: Sequence[str], count: int | None = None) -> str:
    """Return why rows cannot be used: the first reasons, a line each, and the number of the others.

    Args:
        reasons: those of all rows, or of the first ``LISTED``.
        count: number of the rows, if there are only the first reasons.
    """
    count = count or len(reasons)
    if count == 1:
        return reasons[0]
    lines = [f"{count:,} rows cannot be used:", *reasons[:LISTED]]
    if count > LISTED:
        lines.append(f"and {count - LISTED:,} more.")
    return "\n  ".join(lines)


def first_line(error: Exception) -> str:
    """Return the first line of a library's message, or its kind if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def without_process(text: str) -> str:
    """Return a message for an artifact, whose bytes are the same from any process: without addresses of objects and
    names of temporary files, and with whole characters."""
    return whole_characters(_TEMPORARY.sub("", _ADDRESS.sub(r"\1", text)))


def whole_characters(text: str) -> str:
    """Return a text with ? for halves of characters, which UTF-8 does not hold."""
    return text.encode(errors="replace").decode()


def in_words(error: BaseException) -> str:
    """Return the message of any other error, with its notes."""
    return " ".join([f"{type(error).__name__}: {error}.", *getattr(error, "__notes__", [])])
