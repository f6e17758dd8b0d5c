"""Environments: one form, strict parsing, and what processes start with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput, DsecfsError, FormatError, NotFound, TooNew
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.environment import (
    DEFAULT_PATH,
    Environment,
    EnvironmentManifest,
    ProcessDefaults,
    Toolkit,
    check_layers,
    parse_environment,
)
from dsecfs.layers.manifest import LayerManifest, ProcessEnv, canonical_json

A, B, C, D, E = (Digest(c * 64) for c in "abcde")
FULL = Environment(
    "linux/amd64",
    A,
    B,
    (Toolkit("dsh", C),),
    (D,),
    ProcessDefaults({"X": "1"}, "/w", "1:2", ("e",), ("c",), ("sh", "-c")),
)


def layer(**fields: object) -> LayerManifest:
    return LayerManifest("toolkit", "linux/amd64", (), ProcessEnv(**fields))  # type: ignore[arg-type]


def test_the_stored_form() -> None:
    # Written out by hand from docs/formats.md.
    expected = (
        '{"format":1,"labels":{"l":"v"},"platforms":{"linux/amd64":{"base":"' + A + '","process":'
        '{"cmd":["c"],"cwd":"/w","entrypoint":["e"],"env":{"X":"1"},"shell":["sh","-c"],'
        '"user":"1:2"},"snapshots":["' + D + '"],"toolkits":[["dsh","' + C + '"]],'
        '"workspace":"' + B + '"}}}'
    )
    manifest = EnvironmentManifest({"linux/amd64": FULL}, {"l": "v"})
    assert manifest.to_json() == expected.encode()
    assert manifest.digest == sha256(expected.encode())
    assert parse_environment(expected.encode()) == manifest


names = st.text(st.characters(exclude_characters="=\0", codec="utf-8"), min_size=1)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"))
digests = st.sampled_from([A, B, C, D, E])
environments = st.builds(
    Environment,
    st.just("linux/arm64"),
    digests,
    st.none() | digests,
    st.lists(st.builds(Toolkit, names, digests), unique_by=lambda t: t.name).map(tuple),
    st.lists(digests, max_size=5).map(tuple),
    st.builds(
        ProcessDefaults,
        st.dictionaries(names, texts),
        texts,
        texts,
        st.lists(texts).map(tuple),
        st.lists(texts).map(tuple),
        st.lists(texts).map(tuple),
    ),
)


@given(environments, st.dictionaries(texts, texts))
def test_every_manifest_comes_back(env: Environment, labels: dict[str, str]) -> None:
    manifest = EnvironmentManifest({"linux/arm64": env}, labels)
    assert parse_environment(manifest.to_json()) == manifest
    assert env.digest == EnvironmentManifest({"linux/arm64": env}).digest


@given(
    st.binary()
    | st.recursive(
        st.none() | st.integers() | st.text() | st.booleans() | digests,
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda v: json.dumps(v).encode())
)
def test_anything_else_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(DsecfsError):
        parse_environment(data)


@given(st.data())
def test_a_manifest_with_anything_in_one_place(data: st.DataObject) -> None:
    top = json.loads(EnvironmentManifest({"linux/amd64": FULL}, {"l": "v"}).to_json())
    platform = top["platforms"]["linux/amd64"]
    where = data.draw(st.sampled_from([top, platform, platform["process"]]))
    key = data.draw(st.sampled_from([*where, "unknown"]))
    before = json.dumps(top, sort_keys=True)
    where[key] = data.draw(
        st.none() | st.integers() | st.text() | st.lists(st.integers() | st.text(), min_size=1)
        | st.dictionaries(st.text(), st.integers() | st.text())
    )  # fmt: skip
    changed = canonical_json(top)
    try:
        parsed = parse_environment(changed)
    except DsecfsError:
        return
    assert key != "unknown"
    assert parsed.to_json() == changed or json.dumps(top, sort_keys=True) == before


def _changed(**fields: object) -> bytes:
    top = json.loads(EnvironmentManifest({"linux/amd64": FULL}).to_json())
    top["platforms"]["linux/amd64"].update(fields)
    return canonical_json(top)


def test_what_is_refused_and_why() -> None:
    with pytest.raises(TooNew, match="upgrade"):
        parse_environment(b'{"format":2}')
    with pytest.raises(FormatError, match="for no platform"):
        parse_environment(b'{"format":1,"labels":{},"platforms":{}}')
    with pytest.raises(FormatError, match="canonical"):
        parse_environment(FULL_JSON.replace(b",", b", "))
    for fields, why in (
        ({"toolkits": [["a", A], ["a", B]]}, "two toolkits of one name"),
        ({"toolkits": [["a"]]}, "name, digest"),
        ({"snapshots": [A] * 400}, "more than 400 layers"),
        ({"workspace": 7}, "wrong type"),
        ({"process": {"env": {"A=B": "1"}, "cwd": "", "user": "", "entrypoint": [], "cmd": [],
                      "shell": []}}, "not a variable"),
        ({"process": {"env": {}, "cwd": "/a\0b", "user": "", "entrypoint": [], "cmd": [],
                      "shell": []}}, "NUL"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=why):
            parse_environment(_changed(**fields))
    with pytest.raises(FormatError, match="not a digest"):
        parse_environment(_changed(base="../../etc/passwd"))


FULL_JSON = EnvironmentManifest({"linux/amd64": FULL}).to_json()


def test_text_that_is_no_unicode() -> None:
    escaped = FULL_JSON.replace(b'"X":"1"', b'"X":"\\ud800"')
    assert escaped != FULL_JSON
    with pytest.raises(FormatError, match="not valid Unicode"):
        parse_environment(escaped)
    with pytest.raises(BadInput, match="not valid Unicode"):
        EnvironmentManifest({"linux/amd64": FULL}, {"from": "argv \udcff"}).to_json()


def test_layers_from_the_bottom() -> None:
    assert FULL.layers_bottom_up() == (A, B, C, D)
    assert Environment("linux/amd64", A).layers_bottom_up() == (A,)
    assert FULL.with_snapshot(E).layers_bottom_up() == (A, B, C, D, E)
    both = EnvironmentManifest({"linux/amd64": FULL, "linux/arm64": Environment("linux/arm64", E)})
    assert both.layers() == {A, B, C, D, E}
    with pytest.raises(NotFound, match="it is for linux/amd64, linux/arm64"):
        both.for_platform("linux/riscv64")


def test_toolkits_are_replaced_by_name_or_put_on_top() -> None:
    env = FULL.with_toolkits([Toolkit("extra", E), Toolkit("dsh", D)])
    assert env.toolkits == (Toolkit("dsh", D), Toolkit("extra", E))
    assert FULL.toolkits == (Toolkit("dsh", C),)
    assert env.digest != FULL.digest


def test_the_process_environment() -> None:
    layers = [
        layer(set={"HOME": "/root", "LANG": "C", "WHO": "base"}),
        layer(prepend={"PATH": ("/low/bin", "/low/sbin"), "PYTHONPATH": ("/low/py",)}),
        layer(set={"WHO": "toolkit"}, prepend={"PATH": ("/high/bin",)}),
    ]
    env = Environment(
        "linux/amd64", A, process=ProcessDefaults({"PATH": "/image/bin", "LANG": "en"})
    )
    # An image sets PATH whole; a toolkit must be found all the same.
    assert env.process_environment(layers, {"HOME": "/home/me"}) == {
        "PATH": "/high/bin:/low/bin:/low/sbin:/image/bin",
        "PYTHONPATH": "/low/py",
        "HOME": "/home/me",
        "LANG": "en",
        "WHO": "toolkit",
    }
    assert Environment("linux/amd64", A).process_environment([]) == {"PATH": DEFAULT_PATH}
    assert env.process_environment(layers, {"PATH": "/mine"})["PATH"] == "/mine"


def test_layers_of_another_platform_or_kind_are_refused() -> None:
    env = Environment("linux/amd64", A, toolkits=(Toolkit("dsh", C),))
    base = LayerManifest("base", "linux/amd64", ())
    toolkit = LayerManifest("toolkit", "linux/amd64", ())
    check_layers(env, [base, toolkit])
    with pytest.raises(BadInput, match=f"{A[:12]}.*is for linux/arm64, not for linux/amd64"):
        check_layers(env, [LayerManifest("base", "linux/arm64", ()), toolkit])
    with pytest.raises(BadInput, match=f"{C[:12]}.*is a base, not a toolkit"):
        check_layers(env, [base, base])
