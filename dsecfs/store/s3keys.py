"""Credentials for S3 from environment variables, without boto3.

Importing boto3 takes longer than all else that `dsec run` does with a store (docs/dependencies.md).
So where its chain would find credentials and region in the environment, they are taken from
there, and who only reads needs no boto3. What must hold: whenever a profile, a file of settings
or an end of validity could make a difference, the answer is None, and boto3 decides.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self

DEFAULT_REGION = "us-east-1"
_DECIDES_BOTO3 = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CREDENTIAL_EXPIRATION")
_FILES = (
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
)


class Keys(NamedTuple):
    """Credentials as botocore gives them, with a region."""

    access_key: str
    secret_key: str
    token: str | None
    region: str

    def get_frozen_credentials(self) -> Self:
        return self


def environment_keys(region: str | None) -> Keys | None:
    """What boto3's chain finds if it is in the environment. `region` overrides that."""
    get = os.environ.get
    access, secret = get("AWS_ACCESS_KEY_ID"), get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret or any(map(get, _DECIDES_BOTO3)):
        return None
    region = region or get("AWS_DEFAULT_REGION")
    if not region and any(
        Path(get(variable) or default).expanduser().is_file() for variable, default in _FILES
    ):
        return None
    token = get("AWS_SECURITY_TOKEN") or get("AWS_SESSION_TOKEN") or None
    return Keys(access, secret, token, region or DEFAULT_REGION)
