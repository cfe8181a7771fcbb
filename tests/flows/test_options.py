"""Options of the command line are text: nothing of them is taken for YAML."""

from __future__ import annotations

import pytest

from configs.errors import ConfigError
from configs.override_quoting import text_override
from configs.overrides import apply_overrides
from flows.environment import as_overrides
from tasks.runs.opening import run_name
from tests.conftest import ConfigFactory

TEXTS = [
    "x #y",
    "007",
    "yes",
    "2026",
    "[z]",
    "@at",
    "a\nb",
    "a\tb",
    " a ",
    "a: b",
    "'",
    '"',
    "\\n",
    "é😀",
    "\x85\u2028\x7f",
]


@pytest.mark.parametrize("text", [*TEXTS, b"\xff".decode(errors="surrogateescape")])
def test_a_text_is_taken_as_it_is(text: str) -> None:
    assert apply_overrides({}, [text_override("store.root", text)]) == {"store": {"root": text}}
    assert apply_overrides({}, as_overrides(text, text)) == {"store": {"root": text}, "run": {"name": text}}


def test_a_name_has_a_length(make_config: ConfigFactory) -> None:
    assert run_name(make_config(f"run.name={'n' * 128}")) == "n" * 128
    with pytest.raises(ConfigError, match=r"has 129 bytes.*at most 128"):
        run_name(make_config(f"run.name={'n' * 129}"))
