"""The commands that make an artifact that is missing, for messages."""

from __future__ import annotations

from flowmill.storage.layout import ArtifactRef

_OF_KIND = {
    "preferences": "'flowmill rate RUN' makes it of the answers of a run; 'flowmill store ls' lists those that exist.",
    "reward_models": "'flowmill reward fit' with the config of the fit makes it.",
}
_OF_RUNS = "If a run names it, 'flowmill store repair' makes it again, or 'flowmill run' with the run's config."


def remedy(ref: ArtifactRef) -> str:
    """Return the sentence that names the commands which make an artifact of this kind."""
    return _OF_KIND.get(ref.kind, _OF_RUNS)
