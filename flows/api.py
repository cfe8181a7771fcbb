"""Client of the user's Prefect server; its HTTP errors become readable messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings
from pydantic import ValidationError

from flowmill.configs.addresses import without_user
from flowmill.configs.answers import json_of, read_as_utf8, text_of
from flowmill.configs.errors import ConfigError, FlowmillError
from flowmill.configs.extras import is_older, oldest_tested

_MOST = 600
_START = "'flowmill ui', or 'prefect server start'."


@contextlib.contextmanager
def named_server() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server that PREFECT_API_URL or the profile names."""
    url = get_current_settings().api.url
    if not url:
        raise ConfigError(
            "Deployments live on a Prefect server, and PREFECT_API_URL names none. Start one with 'flowmill ui', and "
            "set PREFECT_API_URL=http://127.0.0.1:4200/api."
        )
    # Prefect's client reads the text of error responses.
    read: dict[str, Any] = {"event_hooks": {"response": [read_as_utf8]}}
    with answers(url), get_client(httpx_settings=read, sync_client=True) as client:
        yield client


def check_server() -> None:
    """Check that the configured server answers and has a compatible version; a flow would end with a traceback."""
    with named_server() as client:
        if failure := client.api_healthcheck():
            raise failure
        try:
            client.raise_for_api_version_mismatch()
        except (RuntimeError, ValueError) as error:
            raise _unusable(client, str(error)) from None
        server, oldest = client.api_version(), oldest_tested().get("prefect", "")
        if is_older(server, oldest):
            raise _unusable(client, f"It is of Prefect {server}, older than {oldest}, the oldest that was tested.")


def _unusable(client: SyncPrefectClient, reason: str) -> ConfigError:
    where = f"Prefect's server at PREFECT_API_URL={without_user(str(client.api_url))}"
    return ConfigError(
        f"{where} cannot be used. {without_user(reason)} Start one of the version installed here: {_START}"
    )


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Convert the end of the named server during a flow into a FlowmillError."""
    url = without_user(get_current_settings().api.url or "")
    try:
        yield
    except (httpx.TransportError, httpx.HTTPStatusError, RuntimeError) as error:
        # The first request of a flow is made by a check of versions, which raises an error of its own.
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, httpx.TransportError | httpx.HTTPStatusError) or not without_user(
            str(cause.request.url)
        ).startswith(url):
            raise
        reason = without_user(str(cause)) or type(cause).__name__
        raise FlowmillError(
            f"Prefect's server at PREFECT_API_URL={url} does not answer any more ({reason}). Committed data stays: "
            f"start the server again ({_START[:-1]}), then the same command continues."
        ) from None


@contextlib.contextmanager
def answers(url: str) -> Iterator[None]:
    """Convert errors of the server inside the block into a ConfigError."""
    where = f"Prefect's server at PREFECT_API_URL={without_user(url)}"
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{where} {_refusal(error.response)}") from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{where} does not answer ({error or type(error).__name__}). Is it running, and is the address right? "
            f"Start one: {_START}"
        ) from None
    except PrefectException as error:
        raise ConfigError(f"{where} refuses this: {_short(str(error))}") from None
    except (json.JSONDecodeError, ValidationError, httpx.DecodingError):
        raise ConfigError(
            f"{where} does not answer as Prefect's API does. The address ends in /api, and the server should be of "
            "Prefect 3."
        ) from None


def _refusal(response: httpx.Response) -> str:
    """Return the error response as the rest of a sentence."""
    call = f"{response.request.method} {response.request.url.path}"
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return "requires a password (401). Set PREFECT_API_AUTH_STRING."
    return f"refuses {call} ({response.status_code}): {_short(_detail(response))}"


def _detail(response: httpx.Response) -> str:
    try:
        detail = json_of(response.content)
    except ValueError:
        return text_of(response.content) or response.reason_phrase
    if isinstance(detail, dict):
        keys = ("detail", "exception_detail", "exception_message")
        detail = next((detail[key] for key in keys if detail.get(key)), detail)
    return str(detail)


def _short(text: str) -> str:
    """Return a text on one line, truncated because a server may quote the whole request."""
    line = without_user(" ".join(text.split()))
    return line if len(line) <= _MOST else f"{line[:_MOST]} ..."
