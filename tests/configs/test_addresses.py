"""No address in a config holds a password, whichever setting or option it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowmill.configs.addresses import check_passwords, token_of
from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import ServerSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.serving.server_client import openai_headers
from flowmill.tasks.execution.guard import access_token


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


@pytest.mark.parametrize("token", ["gehëim", "made\x7fup", "made\nup", "made\udce9up"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    name, address = "FLOWMILL_REWARD_TOKEN", ServerSection(url="http://127.0.0.1:1")
    monkeypatch.setenv(name, token)
    callers: list[Callable[[], object]] = [
        lambda: RemoteReward(address, "digits", {}),
        lambda: openai_headers(name),
        lambda: access_token("127.0.0.1", name, where="there"),
    ]
    for call in callers:
        with pytest.raises(ConfigError, match=f"The environment variable {name} has characters") as caught:
            call()
        assert token not in str(caught.value)
    monkeypatch.setenv(name, "made-up\r\n")
    assert openai_headers(name)["authorization"] == "Bearer made-up"
    assert token_of(name) == access_token("127.0.0.1", name, where="there") == "made-up"
    monkeypatch.setenv(name, "\n")
    assert token_of(name) is None
