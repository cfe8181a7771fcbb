"""Addresses: detection of loopback hosts, and refusal of passwords in configs, which would be stored with the run."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Mapping
from typing import Any

from flowmill.configs.errors import ConfigError

_PLACE = re.compile(r"[/?#\s]")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
#: The alternative to a password in a setting or a component's option.
_INSTEAD = {
    "uri": "MLflow reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, a database PGPASSWORD",
    "servers": "the token is in FLOWMILL_ROLLOUT_TOKEN",
    "url": "the token is in FLOWMILL_REWARD_TOKEN",
    "endpoint": "the key is in the variable that 'key_variable' names, OPENAI_API_KEY by default",
}
_ELSEWHERE = "programs read it from the environment or a file of theirs, ~/.netrc for one"


def is_loopback(host: str) -> bool:
    """Return whether a host is the loopback interface of this machine."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def token_of(variable: str) -> str | None:
    """Return the token that an environment variable holds, without spaces and line ends around it; None without one.

    Raises:
        ConfigError: no header of a request can carry it. The message does not contain it.
    """
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"The environment variable {variable} has characters that a header of a request cannot carry: only "
            "printable ASCII. Set it to the token alone."
        )
    return token or None


def holds_token(authorization: str, token: str | None) -> bool:
    """Return whether the value of a request's header ``Authorization`` is the bearer of a token, if one is required."""
    return token is None or secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode())


def check_passwords(name: str, value: Any) -> None:
    """Check that no address within a value holds a password.

    Args:
        name: name of the setting or option.
        value: a string, or a list or mapping that contains strings.

    Raises:
        ValueError: an address holds a password; the message does not repeat it.
    """
    if isinstance(value, str):
        if any(_holds_password(rest) for rest in value.split("://")[1:]):
            instead = _INSTEAD.get(name, _ELSEWHERE)
            raise ValueError(f"holds a password, which would be written down with the run. Take it out; {instead}")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            check_passwords("", str(key))
            check_passwords(str(key), each)
    elif isinstance(value, list | tuple):
        for each in value:
            check_passwords(name, each)


def without_user(text: str) -> str:
    """Return a text whose addresses have no user and password, for messages."""
    return _USER.sub("", text)


def _holds_password(rest: str) -> bool:
    """Return whether the text after ``://`` begins with a user and a password; takes linear time."""
    user, at, _ = _PLACE.split(rest, maxsplit=1)[0].rpartition("@")
    return bool(at and user.partition(":")[2])
