"""From text to a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput, DsecfsError, NotFound, Unsupported
from dsecfs.store.base import ObjectInfo
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.open import check_store, open_backend, open_store
from dsecfs.store.s3 import S3Store, parse_s3_url
from dsecfs.store.threefs import ThreeFsStore


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    for url in (str(root), f"file:{root}", f"file://{root}", "./store", "file:store"):
        backend = open_backend(url)
        assert type(backend) is DirectoryStore and backend.url == f"file:{root}"
        backend.close()
    backend = open_backend(f"3fs:{root}")
    assert type(backend) is ThreeFsStore and backend.url == f"3fs:{root}"
    backend.close()
    # What a store calls itself opens it again.
    again = open_store(open_store(f"3fs:{root}").url)
    assert again.url == f"3fs:{root}"


def test_create_makes_only_what_it_is_asked_to(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_store(f"file:{tmp_path}/a/b")
    open_store(f"file:{tmp_path}/a/b", create=True).close()
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize(
    "url", ["", "store", "ftp://x/y", "http://x", "file:", "3fs:", "s3:", "s3://", "file:a\0b",
            "s3://a", "s3://UPPER/x", "s3://bucket/../x", "s3://bucket/a b", "s3://bucket?x=1",
            "s3://bucket?endpoint=ftp://x", "s3://bucket?endpoint=http://x/path", "s3://bucket#x",
            "s3://bucket?path_style=maybe", "s3://bucket?region=a/b", "s3://bucket?reader=curl",
            "s3://bucket?region=a&region=b"],
)  # fmt: skip
def test_what_is_no_store_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(BadInput) as error:
        open_store(url)
    assert "\n" not in str(error.value)


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(BadInput, match="'ftp'.*file:DIRECTORY.*3fs:DIRECTORY.*s3://BUCKET"):
        open_store("ftp://host/path")


@pytest.mark.parametrize(
    "url",
    ["s3://AKIAKEY:hunter2@bucket/x", "s3://bucket?endpoint=http://AKIAKEY:hunter2@host:1"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadInput) as error:
        open_store(url)
    assert "hunter2" not in str(error.value) and "AKIAKEY" not in str(error.value)


@given(st.text(max_size=60) | st.text("s3:/file.@?=&#%abAB~0", max_size=30))
def test_any_text_is_a_store_or_a_clear_error(text: str) -> None:
    for url in (text, "s3://" + text, "s3://bucket" + text):
        if not url.startswith("s3:"):
            continue
        try:
            settings = parse_s3_url(url)
        except DsecfsError:
            continue
        except ValueError as e:
            pytest.fail(f"{url!r}: {e}")
        assert parse_s3_url(settings.url) == settings


def test_settings_fill_in_what_the_url_does_not_say() -> None:
    backend = open_backend("s3://bucket/p", endpoint="http://host:1/", region="eu-1")
    assert isinstance(backend, S3Store)
    assert backend.url == "s3://bucket/p?endpoint=http://host:1&region=eu-1"
    assert backend.settings.by_path
    backend = open_backend("s3://bucket/p?endpoint=https://a:2&path_style=false", endpoint="http://b")
    assert isinstance(backend, S3Store)
    assert backend.settings.endpoint == "https://a:2" and not backend.settings.by_path
    with pytest.raises(BadInput):
        open_backend("s3://bucket", endpoint="nonsense")


def test_opening_imports_no_client_library(tmp_path: Path) -> None:
    code = (
        "import sys; from dsecfs.store.open import open_store; "
        f"open_store('file:{tmp_path}').close(); open_store('s3://bucket/x').close(); "
        "print([m for m in ('boto3', 'botocore', 'obstore', 'urllib3') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_the_probe_finds_a_store_where_two_win(tmp_path: Path) -> None:
    class Careless(DirectoryStore):
        def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
            self.put_content(key, data)
            return True

    class Forgetful(DirectoryStore):
        def list(self, prefix: str, *, after: str = "") -> list[ObjectInfo]:  # type: ignore[override]
            return []

    for kind, words in ((Careless, "conditional writes do not work"), (Forgetful, "does not list")):
        store = kind(tmp_path)
        with pytest.raises(Unsupported, match=words):
            check_store(store)  # type: ignore[arg-type]
        assert [info.key for info in DirectoryStore(tmp_path).list("")] == []
