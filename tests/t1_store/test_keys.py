"""What is a key, and that the code which names things in a store only makes keys."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.names import parse_name
from dsecfs.store import base
from dsecfs.store.keys import check_key, check_prefix, is_key

texts = st.text(max_size=40) | st.text("./a-_~\0 \n%", max_size=12)


@given(texts)
def test_a_key_stays_below_any_root_and_needs_no_quoting(text: str) -> None:
    if not is_key(text):
        with pytest.raises(BadInput):
            check_key(text)
        return
    assert posixpath.normpath("/root/" + text) == "/root/" + text
    assert text.isascii() and text.isprintable() and not set(text) & set(" %?#&+:\\'\"~")


@given(texts)
def test_prefixes_end_at_components(text: str) -> None:
    try:
        prefix = check_prefix(text)
    except BadInput:
        assert not is_key(text)
        return
    assert prefix == "" or (prefix.endswith("/") and is_key(prefix[:-1]))


def test_all_names_of_a_store_are_keys() -> None:
    digest: Digest = sha256(b"x")
    name = parse_name("a.b_c--d/" + "n" * 180 + ":" + "V" * 128)
    for key in (
        base.head_key(digest),
        base.layout_key(digest, 1),
        base.object_key(digest),
        base.env_key(digest),
        base.import_key(digest),
        base.ref_key("workspace", name.name, name.version),
        base.channel_prefix("workspace", name.name, name.version) + "00000001",
        base.trace_prefix(digest) + "x",
        base.lease_prefix() + "x",
    ):
        assert check_key(key) == key
