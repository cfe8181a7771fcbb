"""What a run's config in a store would carry out, and whether it may: a store's content is not trusted, a config is.

Import strings run code, launchers run commands, clusters do what they are told, trackers and reward servers are sent
what was made. Those of a config that was given on this machine are remembered; those that are only found in a store
want a word of the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from configs.components import components
from configs.errors import TrustError
from configs.fingerprint import canonical_json, hash_text
from configs.places import user_state
from configs.schema import RunConfig

#: Settings whose options are commands, classes or addresses of who carries something out.
_COMMANDS = ("execution.launcher", "execution.runner")


def remember(config: RunConfig) -> None:
    """Take note of what a config that was given on this machine carries out."""
    for _, what in carried_out(config):
        note = _note(what)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.touch(mode=0o600)


def check_trusted(stored: RunConfig, config: RunConfig, *, run: str, only: Collection[str] | None = None) -> None:
    """Check that nothing is carried out that only a store says.

    Args:
        stored: the config found in the store.
        config: what will be used: the same with what was given now.
        run: its run.
        only: settings that are about to be used; all when absent.

    Raises:
        TrustError: something would be that was never given on this machine.
    """
    found = dict(carried_out(stored))
    used = [(name, what) for name, what in carried_out(config) if only is None or name in only]
    strange = [name for name, what in used if found.get(name) == what and not _note(what).exists()]
    if strange:
        listed = "\n  ".join(f"{name}: {found[name]}" for name in strange)
        raise TrustError(
            f"The store's record of run '{run}' names code, commands or addresses that no config given on this machine "
            f"has named:\n  {listed}\nIf you trust everyone who can write to the store, say so with --trust-store; or "
            "give the config itself: flowmill run CONFIG."
        )


def carried_out(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and value of everything in a config that runs someone's code or commands, or sends things away."""
    for setting, component in components(config):
        if setting in _COMMANDS and component.options:
            yield setting, canonical_json(component.model_dump(mode="json"))
        elif ":" in component.name:
            yield setting, component.name
    if config.tracking.uri is not None:
        yield "tracking.uri", config.tracking.uri
    for section in (*config.scored, *config.evaluate.judges):
        if section.server is not None:
            yield f"server of reward '{section.slot}'", section.server.url


def _note(what: str) -> Path:
    return user_state() / "trusted" / hash_text(what)
