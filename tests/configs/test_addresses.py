"""No address in a config holds a password, whichever setting or option it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowmill.configs.addresses import check_passwords
from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("evaluate.judges=[{name: vlm_judge, options: {model: m, endpoint: 'http://u:made-up@h/v1'}}]", "key_variable"),
        ("rewards=[{name: constant, options: {a: [{b: 'HTTPS://u:made-up@h'}]}}]", "environment"),
        ("rewards=[{name: constant, server: 'http://u:made-up@h'}]", "FLOWMILL_REWARD_TOKEN"),
        ("tracking.uri=postgresql://u:made-up@h/db", "PGPASSWORD"),
        ("prompts.train=s3://u:made-up@h/p.txt", "environment"),
    ],
)
def test_a_password_is_refused_and_not_repeated(
    make_config: Callable[..., RunConfig], override: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=f"holds a password.*{instead}") as caught:
        make_config(override)
    assert "made-up" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a" * 1_000_000, "x://" + ":" * 1_000_000, "x://:" * 200_000, "a@b:c, see x://u@h and x://h:80/@"]
)
def test_long_texts_and_addresses_without_passwords_pass(text: str) -> None:
    check_passwords("prompt", text)
