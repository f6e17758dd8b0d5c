"""Image sources against images that skopeo, umoci and podman made and unpack."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsecfs.errors import (
    BadInput,
    Corrupt,
    DeadlineExceeded,
    DsecfsError,
    FormatError,
    NotFound,
    StoreDenied,
    StoreUnavailable,
    Unsupported,
)
from dsecfs.layers.merge import LayerTree, merge
from dsecfs.layers.sources.image import (
    Image,
    Platform,
    RegistryOptions,
    open_image,
    parse_config,
)
from dsecfs.layers.tree import Inode
from tests.t3_layers.disktree import difference, disk_listing
from tests.t3_layers.memsink import MemorySink, listing
from tests.t3_layers.test_sources_tar import archive, get, member, root_only

SYM, DIR, LNK = b"2", b"5", b"1"


def need(*programs: str) -> pytest.MarkDecorator:
    missing = [p for p in programs if shutil.which(p) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str | Path) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


class Sinks:
    """One sink per layer, and content across them."""

    def __init__(self, image: Image) -> None:
        self.sinks = [MemorySink() for _ in image.layers]
        trees = [
            LayerTree.of(layer.load(sink), [i])
            for i, (layer, sink) in enumerate(zip(image.layers, self.sinks, strict=True))
        ]
        self.whole = merge(trees)
        self.root = self.whole.root

    def content(self, inode: Inode) -> bytes:
        if not inode.extents:
            return bytes(inode.size)
        plain = tuple(e._replace(blob=0) for e in inode.extents)
        sink = self.sinks[self.whole.blobs[inode.extents[0].blob]]
        return sink.content(Inode(inode.mode, size=inode.size, extents=plain))


LAYERS = [
    archive(
        member("usr/", DIR, mode=0o755),
        member("usr/bin/", DIR, mode=0o755),
        member("usr/bin/python3.11", data=b"elf" * 5000, mode=0o755),
        member("usr/bin/su", data=b"su", mode=0o4755),
        member("bin", SYM, linkname="usr/bin"),
        member("etc/", DIR, mode=0o755),
        member("etc/passwd", data=b"root"),
        member("etc/keep", data=b"keep"),
        member("var/", DIR),
        member("var/cache/", DIR),
        member("var/cache/a", data=b"a"),
        member("var/cache/b", data=b"b"),
        member("tmp/", DIR, mode=0o1777),
    ),
    archive(),
    archive(
        member("usr/bin/python3", LNK, linkname="usr/bin/python3.11"),
        member("etc/", DIR, mode=0o700, uid=7),
        member("etc/.wh.passwd"),
        member("var/cache/", DIR),
        member("var/cache/.wh..wh..opq"),
        member("var/cache/c", data=b"c"),
    ),
    archive(
        member("var/.wh.cache"),
        member("var/new", data=b"new", pax_headers={"mtime": "1234567890.123456789"}),
    ),
]

CONFIG = {
    "Env": ["PATH=/usr/bin:/bin", "EMPTY=", "A=b=c"],
    "WorkingDir": "/work",
    "User": "1000:1000",
    "Entrypoint": ["/usr/bin/python3"],
    "Cmd": ["-c", "print()"],
    "Labels": {"org.example": "x"},
    "ExposedPorts": {"80/tcp": {}},
    "StopSignal": "SIGINT",
}


def blob(layout: Path, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def add_image(
    layout: Path,
    layers: list[bytes],
    *,
    platform: str = "linux/amd64",
    compress: Callable[[bytes], bytes] = gzip.compress,
    kind: str = "+gzip",
) -> dict[str, Any]:
    """Put an image into a layout; its manifest's descriptor."""
    system, architecture, *variant = platform.split("/")
    where = {"os": system, "architecture": architecture}
    if variant:
        where["variant"] = variant[0]
    diff_ids = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = {**where, "config": CONFIG, "rootfs": rootfs, "history": []}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            **blob(layout, json.dumps(config).encode()),
        },
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar" + kind,
                **blob(layout, compress(layer)),
            }
            for layer in layers
        ],
    }
    return {
        "mediaType": manifest["mediaType"],
        **blob(layout, json.dumps(manifest).encode()),
        "platform": where,
    }


def write_index(layout: Path, entries: list[dict[str, Any]]) -> Path:
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return layout


def tagged(entry: dict[str, Any], tag: str) -> dict[str, Any]:
    return {**entry, "annotations": {"org.opencontainers.image.ref.name": tag}}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    top = tmp_path / "layout"
    top.mkdir()
    return write_index(top, [tagged(add_image(top, LAYERS), "latest")])


def check_whole(image: Image) -> None:
    seen = Sinks(image)
    root = seen.root
    assert sorted(root.children or ()) == [b"bin", b"etc", b"tmp", b"usr", b"var"]
    assert get(root, "usr/bin/python3") is get(root, "usr/bin/python3.11")
    assert seen.content(get(root, "usr/bin/python3")) == b"elf" * 5000
    assert get(root, "usr/bin/su").mode & 0o7777 == 0o4755
    assert list(get(root, "etc").children or ()) == [b"keep"]
    assert get(root, "etc").mode & 0o7777 == 0o700 and get(root, "etc").uid == 7
    assert list(get(root, "var").children or ()) == [b"new"]
    assert get(root, "var/new").mtime_ns == 1234567890123456789
    config = image.config
    assert config.env == {"PATH": "/usr/bin:/bin", "EMPTY": "", "A": "b=c"}
    assert (config.cwd, config.user, config.stop_signal) == ("/work", "1000:1000", "SIGINT")
    assert (config.entrypoint, config.cmd) == (("/usr/bin/python3",), ("-c", "print()"))
    assert config.labels == {"org.example": "x"} and config.exposed == ("80/tcp",)
    assert str(config.platform) == "linux/amd64"
    for layer, plain in zip(image.layers, LAYERS, strict=True):
        assert layer.diff_id == hashlib.sha256(plain).hexdigest()


@pytest.mark.parametrize("kind", ["+gzip", "+zstd", ""])
def test_layout(kind: str, tmp_path: Path) -> None:
    compress: dict[str, Callable[[bytes], bytes]] = {
        "+gzip": gzip.compress,
        "+zstd": zstandard.ZstdCompressor().compress,
        "": lambda data: data,
    }
    entry = add_image(tmp_path, LAYERS, compress=compress[kind], kind=kind)
    write_index(tmp_path, [entry])
    seen: list[int] = []
    with open_image(f"oci:{tmp_path}") as image:
        check_whole(image)
        image.layers[0].load(MemorySink(), progress=seen.append)
        assert sum(seen) == image.layers[0].size


@root_only
@need("umoci")
def test_same_as_umoci_unpack(layout: Path, tmp_path: Path) -> None:
    run("umoci", "unpack", "--image", f"{layout}:latest", tmp_path / "bundle")
    want = disk_listing(str(tmp_path / "bundle/rootfs"))
    with open_image(f"oci:{layout}:latest") as image:
        seen = Sinks(image)
    ours = listing(seen.root, seen)  # type: ignore[arg-type]
    # Times of directories that are changed later, or not named, are umoci's own affair.
    for paths in (ours, want):
        for path in (b"", b"bin", b"usr/bin", b"var", b"etc"):
            paths[path] = (*paths[path][:3], 0, *paths[path][4:])
    assert difference(ours, want) == []


@need("skopeo")
def test_archives_by_skopeo(layout: Path, tmp_path: Path) -> None:
    for kind in ("oci-archive", "docker-archive"):
        file = tmp_path / f"{kind}.tar"
        name = f"{kind}:{file}:example.org/app:1"
        run("skopeo", "copy", "--quiet", f"oci:{layout}:latest", name)
        packed = tmp_path / f"{kind}.tar.gz"
        packed.write_bytes(gzip.compress(file.read_bytes(), 1))
        for spec in (f"{kind}:{file}", name, f"{kind}:{packed}"):
            with open_image(spec) as image:
                check_whole(image)
        with pytest.raises(NotFound, match=r"no image 'example.org/other:1'.*app"):
            open_image(f"{kind}:{file}:example.org/other:1")


def test_old_docker_archive_with_shared_layers(tmp_path: Path) -> None:
    """docker ≤24 wrote a repeated layer as a symbolic link to the first."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": None, "Labels": None},
            "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(LAYERS[0]).hexdigest()] * 2},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    listed = [{"Config": name, "RepoTags": ["app:1"], "Layers": ["one/layer.tar", "two/layer.tar"]}]
    members = [
        member("two/layer.tar", SYM, linkname="../one/layer.tar"),
        member("one/layer.tar", data=LAYERS[0]),
        member(name, data=config),
        member("manifest.json", data=json.dumps(listed).encode()),
    ]
    file = tmp_path / "saved.tar"
    file.write_bytes(archive(*members))
    for spec in (f"docker-archive:{file}", f"docker-archive:{file}:app:1"):
        with open_image(spec) as image:
            assert len(image.layers) == 2
            assert get(Sinks(image).root, "etc/passwd").size == 4
    file.write_bytes(archive(*members[:2], member(name, data=config + b" "), members[3]))
    with pytest.raises(Corrupt, match="config"):
        open_image(f"docker-archive:{file}")
    two = json.dumps([listed[0], {**listed[0], "RepoTags": ["app:2"]}]).encode()
    file.write_bytes(archive(*members[:3], member("manifest.json", data=two)))
    with pytest.raises(BadInput, match="2 images.*app:1, app:2"):
        open_image(f"docker-archive:{file}")
    file.write_bytes(archive(member("x")))
    with pytest.raises(BadInput, match="neither manifest.json nor index.json"):
        open_image(f"docker-archive:{file}")


def test_new_docker_archive_has_another_platform_in_its_layout(tmp_path: Path) -> None:
    top = tmp_path / "l"
    top.mkdir()
    amd = add_image(top, LAYERS)
    arm = add_image(top, LAYERS[:1], platform="linux/arm64/v8")
    write_index(top, [tagged(amd, "1"), tagged(arm, "1")])
    manifest = json.loads((top / "blobs/sha256" / amd["digest"][7:]).read_bytes())

    def path(entry: dict[str, Any]) -> str:
        return f"blobs/sha256/{entry['digest'][7:]}"

    saved = [
        {
            "Config": path(manifest["config"]),
            "RepoTags": ["app:1"],
            "Layers": [path(entry) for entry in manifest["layers"]],
        }
    ]
    (top / "manifest.json").write_text(json.dumps(saved))
    file = tmp_path / "saved.tar"
    with tarfile.open(file, "w") as tar:
        tar.add(top, ".")
    with open_image(f"docker-archive:{file}") as image:
        check_whole(image)
    with open_image(f"docker-archive:{file}", platform="linux/arm64") as image:
        assert str(image.config.platform) == "linux/arm64/v8" and len(image.layers) == 1
    # A layer that was replaced is found by the digest in its name.
    victim = top / path(manifest["layers"][0])
    victim.write_bytes(gzip.compress(LAYERS[2]))
    with tarfile.open(file, "w") as tar:
        tar.add(top, ".")
    with open_image(f"docker-archive:{file}") as image, pytest.raises(Corrupt):
        image.layers[0].load(MemorySink())


def test_platforms(tmp_path: Path) -> None:
    entries = [
        add_image(tmp_path, LAYERS[:1], platform=p)
        for p in ("linux/arm/v6", "linux/arm/v7", "linux/arm64", "linux/amd64", "windows/amd64")
    ]
    attestation = {**entries[0], "platform": {"os": "unknown", "architecture": "unknown"}}
    inner = json.dumps({"schemaVersion": 2, "manifests": [attestation, *entries]}).encode()
    kind = "application/vnd.oci.image.index.v1+json"
    write_index(tmp_path, [tagged({"mediaType": kind, **blob(tmp_path, inner)}, "multi")])
    for wanted in ("linux/arm/v7", "linux/arm64/v8", "linux/amd64", "windows/amd64"):
        with open_image(f"oci:{tmp_path}:multi", platform=wanted) as image:
            assert Platform.parse(wanted).accepts(image.config.platform)
    with pytest.raises(NotFound, match="no image for linux/riscv64.*linux/arm/v6"):
        open_image(f"oci:{tmp_path}", platform="linux/riscv64")
    write_index(tmp_path, [entries[2]])
    with open_image(f"oci:{tmp_path}") as image:  # the only one, whatever this machine is
        assert image.config.platform.architecture == "arm64"
    with pytest.raises(BadInput, match="for linux/arm64, not for linux/amd64"):
        open_image(f"oci:{tmp_path}", platform="linux/amd64")
    without = {k: v for k, v in entries[2].items() if k != "platform"}
    write_index(tmp_path, [without])
    with pytest.raises(BadInput, match="for linux/arm64, not for linux/amd64"):
        open_image(f"oci:{tmp_path}", platform="linux/amd64")
    with pytest.raises(BadInput, match="not a platform"):
        open_image(f"oci:{tmp_path}", platform="linux")


def test_names(layout: Path) -> None:
    index = json.loads((layout / "index.json").read_bytes())
    entry = index["manifests"][0]
    write_index(layout, [entry, tagged(entry, "other")])
    with pytest.raises(BadInput, match="several images; it has latest, other"):
        open_image(f"oci:{layout}")
    with pytest.raises(NotFound, match="no image 'nope'; it has latest, other"):
        open_image(f"oci:{layout}:nope")
    with open_image(f"oci:{layout}:other") as image:
        check_whole(image)


def test_every_byte_is_verified(layout: Path) -> None:
    """One changed byte anywhere in a blob is found, before or while it is used."""
    blobs = sorted((layout / "blobs/sha256").iterdir())
    assert len(blobs) == 6
    for path in blobs:
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(DsecfsError), open_image(f"oci:{layout}") as image:
                Sinks(image)
        path.write_bytes(good[:-1])
        with pytest.raises(DsecfsError), open_image(f"oci:{layout}") as image:
            Sinks(image)
        path.unlink()
        with pytest.raises(NotFound, match="missing"):
            open_image(f"oci:{layout}")
        path.write_bytes(good)
    with open_image(f"oci:{layout}") as image:
        check_whole(image)


def test_wrong_diff_id_and_trailing_bytes(tmp_path: Path) -> None:
    entry = add_image(tmp_path, LAYERS[:1], compress=lambda d: gzip.compress(d + bytes(512)))
    write_index(tmp_path, [entry])
    with (
        open_image(f"oci:{tmp_path}") as image,
        pytest.raises(Corrupt, match=r"layer 1 of oci:.*uncompressed"),
    ):
        image.layers[0].load(MemorySink())


def edit(layout: Path, change: Callable[[dict[str, Any]], None], where: str = "manifest") -> None:
    """Change the manifest or config of the only image; digests on the way are made right."""
    index = json.loads((layout / "index.json").read_bytes())
    entry = index["manifests"][0]
    manifest = json.loads((layout / "blobs/sha256" / entry["digest"][7:]).read_bytes())
    if where == "config":
        config = json.loads(
            (layout / "blobs/sha256" / manifest["config"]["digest"][7:]).read_bytes()
        )
        change(config)
        manifest["config"].update(blob(layout, json.dumps(config).encode()))
    else:
        change(manifest)
    entry.update(blob(layout, json.dumps(manifest).encode()))
    (layout / "index.json").write_text(json.dumps(index))


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], None], type[DsecfsError], str]] = {
    "path as digest": (
        "manifest",
        lambda m: m["layers"][0].update(digest="sha256:../../../etc/passwd"),
        BadInput,
        "not a digest",
    ),
    "other hash": (
        "manifest",
        lambda m: m["layers"][0].update(digest="sha512:" + "0" * 128),
        BadInput,
        "not a digest",
    ),
    "no layers": ("manifest", lambda m: m.pop("layers"), FormatError, "list of descriptors"),
    "one layer less": ("manifest", lambda m: m["layers"].pop(), BadInput, "3 layers for 4"),
    "size": ("manifest", lambda m: m["layers"][0].update(size=True), FormatError, "descriptor"),
    "encrypted": (
        "manifest",
        lambda m: m["layers"][1].update(mediaType="application/x.tar+encrypted"),
        Unsupported,
        "layer 2",
    ),
    "no tar": (
        "manifest",
        lambda m: m["layers"][0].update(mediaType="application/wasm"),
        Unsupported,
        "application/wasm",
    ),
    "media type": (
        "manifest",
        lambda m: m["layers"][0].update(mediaType="\ud800"),
        Unsupported,
        "layer 1 is a",
    ),
    "Env": ("config", lambda c: c["config"].update(Env=[1]), FormatError, "'Env'"),
    "Cmd": ("config", lambda c: c["config"].update(Cmd="sh"), FormatError, "'Cmd'"),
    "diff ids": ("config", lambda c: c["rootfs"].update(diff_ids=["x"] * 4), BadInput, "digest"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests(case: str, layout: Path) -> None:
    where, change, error, message = HOSTILE[case]
    edit(layout, change, where)
    with pytest.raises(error, match=message):
        open_image(f"oci:{layout}")


def test_lengths_that_lie(layout: Path) -> None:
    for size in (5, 10**9):
        edit(layout, lambda m, size=size: m["layers"][0].update(size=size))  # type: ignore[misc]
        with open_image(f"oci:{layout}") as image, pytest.raises(Corrupt, match="manifest"):
            image.layers[0].load(MemorySink())


def test_index_that_is_none(layout: Path) -> None:
    for text in ("", "[]", "{}", '{"manifests": [1]}', '{"manifests": []}', "[" * 100_000):
        (layout / "index.json").write_text(text)
        with pytest.raises(DsecfsError, match="layout"):
            open_image(f"oci:{layout}")
    (layout / "index.json").write_bytes(b" " * (9 << 20))
    with pytest.raises(BadInput, match="at most"):
        open_image(f"oci:{layout}")
    (layout / "index.json").unlink()
    os.mkfifo(layout / "index.json")
    with pytest.raises(NotFound, match="index.json"):
        open_image(f"oci:{layout}")


def test_indexes_without_end(tmp_path: Path) -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    entry = add_image(tmp_path, [])
    for _ in range(9):
        inner = json.dumps({"manifests": [entry]}).encode()
        entry = {"mediaType": kind, **blob(tmp_path, inner)}
    write_index(tmp_path, [entry])
    with pytest.raises(BadInput, match="nested"):
        open_image(f"oci:{tmp_path}")


def test_specs(tmp_path: Path) -> None:
    for spec in ("", "oci", "oci:", "ftp://x", "docker-daemon:x"):
        with pytest.raises(BadInput):
            open_image(spec)
    for spec in ("oci:/no/such:tag", "oci-archive:/no/such", "docker-archive:/no/such:x"):
        with pytest.raises(NotFound, match="/no/such"):
            open_image(spec)
    for spec in ("tar:/no/such", "dir:/no/such", "upper:/no/such"):
        with pytest.raises(NotFound, match="/no/such"):
            open_image(spec)
    (tmp_path / "d/sub").mkdir(parents=True)
    for spec in (f"tar:{tmp_path}", f"dir:{__file__}"):
        with pytest.raises(BadInput, match="not a"):
            open_image(spec)
    (tmp_path / "a.tar").write_bytes(archive(member("f", data=b"x")))
    with open_image(f"tar:{tmp_path}/a.tar") as image:
        assert list(image.layers[0].load(MemorySink()).root.children or ()) == [b"f"]
    for kind in ("dir", "upper"):
        with open_image(f"{kind}:{tmp_path}/d", platform="linux/arm64") as image:
            assert list(image.layers[0].load(MemorySink()).root.children or ()) == [b"sub"]
            assert image.config.platform == Platform("linux", "arm64")


def test_config_of_nulls() -> None:
    config, diff_ids = parse_config(b'{"config": null, "os": null, "rootfs": null}', "config")
    assert config.env == {} and diff_ids == [] and config.platform.os == "linux"
    config, _ = parse_config(
        b'{"config": {"Env": ["=odd", "bare"], "User": "\\ud83d\\ude00"}}', "c"
    )
    assert config.env == {"bare": ""} and config.user == "\N{GRINNING FACE}"
    for bad in ('"Cmd": ["a\\u0000"]', '"User": "\\ud800"', '"Labels": {"\\udfff": ""}'):
        with pytest.raises(FormatError, match="c: not usable as text"):
            parse_config(f'{{"config": {{{bad}}}}}'.encode(), "c")


# Registries.


HTPASSWD = "joe:$2b$04$2KYxpwScRT2GoeffNd99POnf1TpZgsTo7Wp6WkA2cdjp.IkiU2e62"
"""joe, hunter2, by bcrypt."""


@pytest.fixture(params=["open", "private"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a registry of our own, without TLS; the private one asks for a password."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = tmp_path / "registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    (tmp_path / "htpasswd").write_text(HTPASSWD + "\n")
    if request.param == "private":
        with config.open("a") as f:
            f.write(f"auth: {{htpasswd: {{realm: r, path: '{tmp_path}/htpasswd'}}}}\n")
    process = subprocess.Popen(
        ["docker-registry", "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@need("skopeo", "docker-registry")
def test_registry(registry: str, layout: Path, tmp_path: Path) -> None:
    name = f"docker://{registry}/swe/django:1"
    authfile = tmp_path / "auth.json"
    login = base64.b64encode(b"joe:hunter2").decode()
    authfile.write_text(json.dumps({"auths": {registry: {"auth": login}}}))
    push = ("skopeo", "copy", "--quiet", "--dest-tls-verify=false", "--authfile", authfile)
    run(*push, f"oci:{layout}:latest", name)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = RegistryOptions(authfile, tls_verify=False, scratch=scratch, timeout_s=60)
    with open_image(name, registry=options) as image:
        check_whole(image)
        assert list(scratch.iterdir()) != []
    assert list(scratch.iterdir()) == []
    with pytest.raises(NotFound, match="django:2: not in the registry"):
        open_image(name.replace(":1", ":2"), registry=options)
    with pytest.raises(BadInput, match="TLS"):
        open_image(name, registry=RegistryOptions(authfile, scratch=scratch, timeout_s=60))
    if "auth:" in (tmp_path / "registry.yml").read_text():
        login = base64.b64encode(b"joe:hunter3").decode()
        authfile.write_text(json.dumps({"auths": {registry: {"auth": login}}}))
        with pytest.raises(StoreDenied, match="credentials") as e:
            open_image(name, registry=options)
        assert "hunter" not in str(e.value) and login not in str(e.value)
        return
    with pytest.raises(BadInput, match="not for linux/arm64|no image"):
        open_image(name, platform="linux/arm64", registry=options)
    assert list(scratch.iterdir()) == []


@need("skopeo")
def test_a_silent_registry_meets_the_deadline(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        options = RegistryOptions(tls_verify=False, scratch=tmp_path, timeout_s=1)
        with pytest.raises(DeadlineExceeded, match="within 1 s"):
            open_image(f"docker://127.0.0.1:{s.getsockname()[1]}/x:1", registry=options)
    assert list(tmp_path.iterdir()) == []


@need("skopeo")
def test_a_registry_that_is_away_may_be_asked_again(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(StoreUnavailable, match="network") as e:
            open_image(f"docker://127.0.0.1:{s.getsockname()[1]}/x:1")
    assert e.value.recoverable


def test_references_and_secrets() -> None:
    for text in ("--help", "docker://u:hunter2@h/x:1", "docker://h/UPPER", "docker://h/x:1 -v"):
        with pytest.raises(BadInput) as e:
            open_image(text if text.startswith("docker") else f"docker:{text}")
        assert "hunter2" not in str(e.value)
    from dsecfs.layers.sources.registry import _scrub

    said = 'Get "https://joe:hunter2@h/v2": Authorization: Bearer hunter2 token=hunter2&x'
    assert "hunter2" not in _scrub(said) and "h/v2" in _scrub(said)


def test_many_open_images_do_not_leak(layout: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = tmp_path / "image.tar"
    with tarfile.open(file, "w") as tar:
        tar.add(layout, ".")
    for _ in range(3):
        with open_image(f"oci-archive:{file}") as image:
            check_whole(image)
        with pytest.raises(NotFound):
            open_image(f"oci-archive:{file}:nope")
    assert len(os.listdir("/proc/self/fd")) == before


def test_archive_index_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    file.write_bytes(archive(member("blobs/sha256/x", data=bytes(9000)))[:5000])
    with pytest.raises(BadInput, match="truncated"):
        open_image(f"oci-archive:{file}")
