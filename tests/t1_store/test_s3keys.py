"""Credentials from the environment are those that boto3 finds, or boto3 is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from dsecfs.store.s3keys import environment_keys
from tests.support.seaweed import Seaweed

BOTH = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with no settings and an environment with none."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        BOTH,
        {**BOTH, "AWS_SESSION_TOKEN": "token"},
        {**BOTH, "AWS_SECURITY_TOKEN": "old", "AWS_SESSION_TOKEN": "new"},
        {**BOTH, "AWS_DEFAULT_REGION": "eu-north-1"},
        {**BOTH, "AWS_REGION": "eu-north-1"},
        {**BOTH, "AWS_SESSION_TOKEN": ""},
    ],
)
def test_the_environment_decides_as_in_boto3(
    home: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    keys = environment_keys(None)
    session = boto3.session.Session()
    assert keys is not None
    frozen = session.get_credentials().get_frozen_credentials()
    assert keys[:3] == (frozen.access_key, frozen.secret_key, frozen.token)
    assert keys.region == (session.region_name or "us-east-1")
    assert environment_keys("xx-1") == keys._replace(region="xx-1")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"AWS_ACCESS_KEY_ID": "key"},
        {**BOTH, "AWS_SECRET_ACCESS_KEY": ""},
        {**BOTH, "AWS_PROFILE": "work"},
        {**BOTH, "AWS_CREDENTIAL_EXPIRATION": "2030-01-01T00:00:00Z"},
    ],
)
def test_boto3_is_asked_where_more_than_two_variables_count(
    home: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment_keys("xx-1") is None


@pytest.mark.parametrize("name", ["config", "credentials"])
def test_a_region_may_be_in_a_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in BOTH.items():
        monkeypatch.setenv(variable, value)
    (home / ".aws" / name).write_text("[default]\nregion = eu-west-3\n")
    assert environment_keys(None) is None
    assert boto3.session.Session().region_name == "eu-west-3"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    keys = environment_keys(None)
    assert keys is not None and keys.region == "eu-north-1"


def test_reading_imports_no_boto3(s3_server: Seaweed) -> None:
    script = f"""
import sys
from dsecfs.errors import NotFound
from dsecfs.store.open import open_store
store = open_store({s3_server.url(prefix="quick")!r})
try:
    store.get("missing")
except NotFound:
    pass
assert not {{"boto3", "botocore", "urllib3"}} & set(sys.modules), "reading"
open_store({s3_server.url(prefix="quick")!r}, load=True)
assert "boto3" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
