"""Roots: the supported file systems of stores.

A new one is one file here with a class that implements ``base.Root``, and one line in the table.
"""

from __future__ import annotations

from flowmill.configs.errors import StoreError
from flowmill.configs.registry import Table, resolve
from flowmill.configs.schema import StoreSection
from flowmill.configs.user_directories import user_path
from flowmill.storage.backends.base import Root

ROOTS = Table(
    {
        "file": "flowmill.storage.backends.local:LocalBackend",
        "s3": "flowmill.storage.backends.s3:S3Backend",
    },
    like="flowmill.storage.backends.base:Root",
)


def may_exist(section: StoreSection) -> bool:
    """Return whether there may be a store; one that is opened is created."""
    return "://" in section.root or user_path(section.root).is_dir()


def open_backend(section: StoreSection) -> Root:
    """Return the root that a config names, created if needed."""
    if not section.root:
        raise StoreError("store.root is empty: it names nothing. Give a folder or s3://bucket/prefix.")
    scheme, separator, rest = section.root.partition("://")
    if not separator:
        scheme, rest = "file", section.root
    if scheme not in ROOTS:
        schemes = ", ".join(f"{name}://" for name in ROOTS)
        raise StoreError(f"store.root '{section.root}': there is no store for '{scheme}://'; there are {schemes}.")
    return resolve(ROOTS, scheme, label="store.root")(rest, section)  # type: ignore[no-any-return]
