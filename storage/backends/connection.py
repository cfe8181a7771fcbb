"""Connections to S3: endpoint and credentials come from the usual AWS variables and files, and are tested at once."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import botocore.session
import s3fs
import tenacity
from aiohttp import ClientError as HttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as EndpointError
from obstore.store import S3Store
from s3fs.core import S3_RETRYABLE_ERRORS

from flowmill.configs.errors import StoreError

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

#: Errors of servers that do not answer, and of refused or missing credentials.
UNREACHED = (HttpError, EndpointError, *S3_RETRYABLE_ERRORS)
DENIED = (PermissionError, NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
#: Seconds within which a server must answer when a store is opened, and seconds per attempt.
_OPENED_S, _TRY_S = 8.0, 4
_ENDPOINT = "AWS_ENDPOINT_URL"


def connection(*, attempts: int, connect_s: int, read_s: int) -> Any:
    """Return an s3fs file system.

    Args:
        attempts: attempts of the client itself per request.
        connect_s: connection timeout in seconds.
        read_s: read timeout in seconds.
    """
    client = s3fs.S3FileSystem(
        use_listings_cache=False,
        # Explicit, as s3fs shares instances with equal arguments, and one process may use several servers.
        endpoint_url=os.environ.get(_ENDPOINT),
        config_kwargs={
            "retries": {"mode": "standard", "total_max_attempts": attempts},
            "connect_timeout": connect_s,
            "read_timeout": read_s,
            # Several servers send nonstandard checksums; every byte is checked against its commit record instead.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    # Retries inside retries would wait a quarter of an hour for a lost server.
    client.retries = 1
    return client


class Credentials:
    """The credentials of this process, looked up once and refreshed when they expire."""

    def __init__(self) -> None:
        self._credentials: Any = None

    def now(self) -> ReadOnlyCredentials | None:
        """Return the current credentials; None if there are none, or they cannot be refreshed, which s3fs reports."""
        with contextlib.suppress(BotoCoreError, RuntimeError):
            if self._credentials is None:
                self._credentials = botocore.session.get_session().get_credentials()
            return None if self._credentials is None else self._credentials.get_frozen_credentials()
        return None


def quick_connection(client: Any, bucket: str, credentials: ReadOnlyCredentials) -> S3Store:
    """Return an obstore client (in Rust) for a bucket.

    Args:
        client: an s3fs file system, whose server it uses.
        credentials: the current credentials.
    """
    meta = client.s3.meta
    return S3Store(
        bucket,
        endpoint=meta.endpoint_url,
        access_key_id=credentials.access_key,
        secret_access_key=credentials.secret_key,
        region=meta.region_name or "us-east-1",
        virtual_hosted_style_request=False,
        # Timeouts for small objects; slower requests are left to s3fs.
        client_options={
            "connect_timeout": "5s",
            "timeout": "20s",
            "allow_http": meta.endpoint_url.startswith("http:"),
        },
        retry_config={"max_retries": 0},
        **({"session_token": credentials.token} if credentials.token else {}),
    )


def check_bucket(uri: str, bucket: str) -> None:
    """Check that a bucket is accessible, within 15 seconds or so in any case."""
    endpoint = _endpoint()
    impatient = connection(attempts=1, connect_s=_TRY_S, read_s=_TRY_S)
    retrying = tenacity.Retrying(
        # Retries do not fix certificate and protocol errors.
        retry=tenacity.retry_if_exception(lambda error: not isinstance(error, (SSLError, FileNotFoundError, *DENIED))),
        stop=tenacity.stop_after_delay(_OPENED_S),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1),
        reraise=True,
    )
    try:
        retrying(impatient.call_s3, "head_bucket", Bucket=bucket)
    except FileNotFoundError:
        raise StoreError(f"'{uri}': there is no bucket '{bucket}' at {endpoint}. Create it first.") from None
    except DENIED as error:
        raise refusal(uri, bucket, error) from None
    except (OSError, *UNREACHED) as error:
        hint = " Write http:// where it speaks no TLS." if isinstance(error, SSLError) else ""
        raise StoreError(
            f"'{uri}': {endpoint} does not answer ({error}). Check {_ENDPOINT} and the network.{hint}"
        ) from None


class AccessRefusedError(StoreError):
    """Credentials are missing, expired, or do not suffice."""


def refusal(uri: str, bucket: str, error: Exception) -> AccessRefusedError:
    """Return the error of credentials that are missing, expired or refused."""
    return AccessRefusedError(
        f"'{uri}': access to bucket '{bucket}' at {os.environ.get(_ENDPOINT, 'AWS')} is refused ({error}). Set "
        "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, to keys that may read and write there. Committed "
        "data stays: the same command goes on."
    )


def status_of(error: BaseException) -> int:
    """Return the HTTP status behind an error; 0 if there is none."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    response = getattr(cause, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def server() -> str:
    """Return the address of the server, independent of the bucket."""
    return os.environ.get(_ENDPOINT) or "https://s3.amazonaws.com"


def _endpoint() -> str:
    """Return the server's address for messages; raise StoreError if the variable holds an invalid one."""
    endpoint = os.environ.get(_ENDPOINT)
    if endpoint is None:
        return "AWS"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StoreError(
            f"{_ENDPOINT} is '{endpoint}', which is no address. Write it as http://HOST:PORT or https://HOST."
        )
    return endpoint
