"""What an S3 server or client library says, in terms of the error tree.

What must hold: an error repeats the status and the error code of an answer and nothing
else of it. Bodies hold key ids and signed strings, and exceptions hold proxy URLs.
"""

from __future__ import annotations

import email.utils
import functools
import re
import time
from typing import Any

from dsecfs.errors import (
    DsecfsError,
    NotFound,
    ShortRead,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)

# Amazon S3 API reference, "List of error codes".
_TRANSIENT = {
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_DENIED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect"}
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}\Z")


@functools.cache
def boto_errors() -> tuple[type[Exception], ...]:
    """Everything boto3 raises for a request, including while a body is read."""
    import botocore.exceptions
    import urllib3.exceptions

    return (
        botocore.exceptions.BotoCoreError,
        botocore.exceptions.ClientError,
        urllib3.exceptions.HTTPError,
    )


def explain(e: Exception, url: str, bucket: str, verb: str, key: str) -> DsecfsError:
    """The error to raise for one of `boto_errors`."""
    import botocore.exceptions as boto

    what = f"{url}: cannot {verb} {key}"
    if isinstance(e, boto.ClientError):
        meta: dict[str, Any] = e.response.get("ResponseMetadata", {})
        return by_status(
            meta.get("HTTPStatusCode", 0),
            str(e.response.get("Error", {}).get("Code", "")),
            url,
            bucket,
            verb,
            key,
            retry_after=meta.get("HTTPHeaders", {}).get("retry-after"),
        )
    if isinstance(
        e, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    ):
        return StoreDenied(
            f"{what}: no usable credentials ({type(e).__name__})",
            hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the node's role",
        )
    if isinstance(e, (boto.ParamValidationError, boto.ConfigParseError, boto.ProfileNotFound)):
        return StoreError(f"{what}: {type(e).__name__}", hint="check the AWS settings")
    return StoreUnavailable(f"{what}: {type(e).__name__}")


def by_status(
    status: int,
    code: str,
    url: str,
    bucket: str,
    verb: str,
    key: str,
    *,
    retry_after: str | None = None,
) -> DsecfsError:
    """The error for an HTTP status and an S3 error code ("" if there was none)."""
    code = code if _CODE.match(code) else ""
    what = f"{url}: cannot {verb} {key}: {status} {code}".rstrip()
    if code == "NoSuchBucket":
        return StoreError(f"{url}: there is no bucket {bucket}", hint="create it first")
    if code == "NotImplemented" or status == 501:
        return StoreError(what, hint="this server lacks what dsec needs; see docs/stores.md")
    if code in _TRANSIENT or status in (408, 409, 429) or status >= 500:
        return StoreUnavailable(what, retry_after_s=_seconds(retry_after))
    if status == 404:
        return NotFound(f"{url}: no object {key}")
    if status == 416:
        return ShortRead(f"{url}: {key} ends before the range that was asked for")
    if status == 412:
        return ShortRead(f"{url}: {key} changed while it was read")
    if status in (401, 403) or code in _DENIED:
        return StoreDenied(what, hint="check the credentials and the bucket's policy")
    if code in _WRONG_REGION or status in (301, 307):
        return StoreError(what, hint="the bucket is in another region; set region=")
    return StoreError(what)


def _seconds(value: str | None) -> float | None:
    """Retry-After (RFC 9110 §10.2.3): seconds, or a date."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,6}", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
