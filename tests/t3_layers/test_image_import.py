"""Images become environments: one merged base over blobs that images share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.errors import BadInput, Conflict, Corrupt, DsecfsError, NotFound, UnsafeArchive
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import ProcessDefaults
from dsecfs.layers.image import STEPS, Imported, import_image
from dsecfs.layers.names import parse_name
from dsecfs.layers.sources.image import Image, ImageConfig, ImageLayer, Platform, open_image
from dsecfs.layers.verify import verify_layer
from dsecfs.store.base import head_key, layout_key, object_key
from dsecfs.store.directory import DirectoryStore
from tests.support.mounts import mounted, why_no_erofs
from tests.t3_layers.disktree import difference, disk_listing
from tests.t3_layers.oci import layer_tar, oci_layout
from tests.t3_layers.readback import layer_listing, read_blob, read_head, read_layout

NAME = parse_name("swe/django:1")
BASE = layer_tar(
    [
        ("etc/", None),
        ("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
        ("etc/hosts", b"127.0.0.1 localhost\n"),
        ("usr/lib/", None),
        ("usr/lib/big", b"library " * 100_000),
        ("usr/lib/old/", None),
        ("usr/lib/old/a", b"a"),
        ("usr/lib/old/b", b"b"),
        ("lib -> usr/lib", None),
        ("srv/", None),
        ("srv/file", b"was a file's directory"),
    ]
)
MIDDLE = layer_tar(
    [
        ("etc/.wh.hosts", b""),
        ("etc/passwd", b"root:x:0:0::/root:/bin/bash\n"),
        ("usr/lib/old/", None),
        ("usr/lib/old/.wh..wh..opq", b""),
        ("usr/lib/old/c", b"c"),
        ("usr/lib/big2 => usr/lib/big", None),
        ("lib/through-a-link", b"lies in usr/lib"),
        (".wh.srv", b""),
    ]
)
TOP = layer_tar([("srv", b"now a file"), ("app/", None), ("app/main.py", b"print('hi')\n")])
OTHER_TOP = layer_tar([("app/", None), ("app/other.py", b"print('other')\n" * 5000)])
CONFIG = {
    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "A=1=2"],
    "WorkingDir": "/app",
    "User": "1000:1000",
    "Entrypoint": ["python3"],
    "Cmd": ["main.py"],
    "Shell": ["/bin/bash", "-c"],
    "Labels": {"maintainer": "somebody"},
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "store", create=True)
    yield store
    store.close()


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return oci_layout(tmp_path / "image", [BASE, MIDDLE, TOP], CONFIG)


def do_import(store: Any, layout: Path, name: Any = NAME, **options: Any) -> Imported:
    with open_image(f"oci:{layout}", platform="linux/amd64") as image:
        return import_image(store, image, name, **options)


def test_the_base_shows_what_umoci_unpacks(
    store: DirectoryStore, layout: Path, tmp_path: Path
) -> None:
    if why_no_erofs():
        pytest.skip(why_no_erofs())
    if not shutil.which("umoci"):
        pytest.skip("umoci is not installed (apt-get install umoci)")
    done = do_import(store, layout)
    head = read_head(store, done.base.digest)
    assert len(head.manifest.blobs) == 3
    meta = tmp_path / "meta.erofs"
    meta.write_bytes(head.erofs)
    devices = []
    for i, (ref, digests) in enumerate(zip(head.manifest.blobs, head.chunk_digests, strict=True)):
        devices.append(tmp_path / f"blob{i}")
        devices[-1].write_bytes(read_blob(store, ref, digests))
    subprocess.run(
        ["umoci", "unpack", "--image", f"{layout}:latest", str(tmp_path / "bundle")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with mounted(meta, devices) as root:
        ours = disk_listing(str(root))
    theirs = disk_listing(str(tmp_path / "bundle" / "rootfs"))

    def comparable(found: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
        # Directories that no entry names get the time of unpacking from umoci.
        return {
            p: (*v[:3], 0 if v[0].startswith("d") else v[3], *v[4:])
            for p, v in found.items()
        }  # fmt: skip

    assert difference(comparable(ours), comparable(theirs)) == []
    assert {b"usr/lib/through-a-link", b"usr/lib/old/c", b"usr/lib/big2"} <= ours.keys()
    assert not {b"etc/hosts", b"usr/lib/old/a", b"srv/file"} & ours.keys()
    # The hard link across layers is one inode.
    assert ours[b"usr/lib/big2"][8] == b"usr/lib/big"


def test_the_configuration_becomes_the_environment(store: DirectoryStore, layout: Path) -> None:
    done = do_import(store, layout)
    env = Catalog(store).environment_for("swe/django:1", platform="linux/amd64")
    assert env.base == done.base.digest
    assert env.process == ProcessDefaults(
        {"PATH": "/usr/local/bin:/usr/bin:/bin", "A": "1=2"},
        "/app",
        "1000:1000",
        ("python3",),
        ("main.py",),
        ("/bin/bash", "-c"),
    )
    found = Catalog(store).resolve("swe/django:1")
    assert found.kind == "env" and found.digest == done.environment
    assert Catalog(store).resolve("base/swe/django:1").digest == done.base.digest
    assert list(store.list("leases/")) == []


def test_an_import_without_reuse_heals_wrong_bytes(store: DirectoryStore, layout: Path) -> None:
    done = do_import(store, layout)
    assert not verify_layer(store, done.base.digest).damage
    for info in store.list("objects/"):
        path = store.root / info.key
        path.write_bytes(bytes(b ^ 1 for b in path.read_bytes()))
    assert do_import(store, layout).reused == 3
    assert verify_layer(store, done.base.digest).damage
    again = do_import(store, layout, reuse=False)
    assert again.reused == 0 and again.base.digest == done.base.digest
    assert not verify_layer(store, done.base.digest).damage


def test_a_second_image_reads_and_uploads_only_what_is_new(
    store: DirectoryStore, layout: Path, tmp_path: Path
) -> None:
    first = do_import(store, layout)
    assert (first.layers, first.reused) == (3, 0)
    objects = {i.key for i in store.list("objects/")}
    second = oci_layout(tmp_path / "second", [BASE, MIDDLE, OTHER_TOP], CONFIG)
    # The shared layers cannot be read: that they are not is the point.
    shared = {i.diff_id for i in open_image(f"oci:{layout}", platform="linux/amd64").layers[:2]}
    with open_image(f"oci:{second}", platform="linux/amd64") as image:
        image.layers = tuple(unreadable(i) if i.diff_id in shared else i for i in image.layers)
        done = import_image(store, image, parse_name("swe/django:2"))
    assert (done.layers, done.reused) == (3, 2)
    assert len({i.key for i in store.list("objects/")} - objects) == 1
    # What a fresh store gives is the same, so nothing of the trees was lost on the way.
    other = DirectoryStore(tmp_path / "other", create=True)
    assert do_import(other, second).base.digest == done.base.digest
    assert layer_listing(other, done.base.digest) == layer_listing(store, done.base.digest)
    other.close()


def unreadable(layer: ImageLayer) -> ImageLayer:
    def load(*_: Any) -> Any:
        raise AssertionError("a layer was read that the store has")

    return ImageLayer(layer.diff_id, layer.size, load)


def test_importing_again_changes_nothing(store: DirectoryStore, layout: Path) -> None:
    first = do_import(store, layout)
    before = sorted(i.key for i in store.list(""))
    again = do_import(store, layout)
    assert again.base.digest == first.base.digest and again.environment == first.environment
    assert again.reused == 3 and again.uploaded == 0
    assert sorted(i.key for i in store.list("")) == before


@pytest.mark.parametrize(
    "what", ["head", "layout", "object", "cut object", "record", "other record"]
)
def test_a_record_is_only_a_hint(store: DirectoryStore, layout: Path, what: str) -> None:
    first = do_import(store, layout)
    whole = layer_listing(store, first.base.digest)
    record = next(store.list("imports/")).key
    for info in list(store.list("heads/")):
        layer = info.key.rpartition("/")[2]
        if layer == first.base.digest:
            continue
        blob = read_head(store, layer).manifest.blobs[0]  # type: ignore[arg-type]
        if what == "head":
            store.delete(head_key(layer))  # type: ignore[arg-type]
        elif what == "object":
            store.delete(object_key(read_layout(store, blob).objects[0]))
        elif what == "cut object":
            path = store.root / object_key(read_layout(store, blob).objects[0])
            os.truncate(path, path.stat().st_size - 1)
        elif what == "layout":
            store.delete(layout_key(blob.digest, 1))
    if what.endswith("record"):
        store.delete(record)
    if what == "other record":
        # A record that leads to another layer, which is there.
        store.put_if_absent(
            record, b'{"format":1,"layer":"' + first.base.digest.encode() + b'"}'
        )
    again = do_import(store, layout)
    assert again.base.digest == first.base.digest
    assert layer_listing(store, first.base.digest) == whole


def test_the_same_layer_twice_is_loaded_once(store: DirectoryStore, tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "twice", [BASE, TOP, BASE, layer_tar([])])
    done = do_import(store, layout)
    assert done.layers == 4
    assert len(read_head(store, done.base.digest).manifest.blobs) == 2


def test_an_image_without_layers(store: DirectoryStore, tmp_path: Path) -> None:
    done = do_import(store, oci_layout(tmp_path / "empty", []))
    assert set(layer_listing(store, done.base.digest)) == {b""}


def test_marks_in_an_archive_are_left_out(store: DirectoryStore, tmp_path: Path) -> None:
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("trap")
        info.pax_headers = {
            "SCHILY.xattr.trusted.dsec.link": "etc/shadow",
            "SCHILY.xattr.user.kept": "yes",
        }
        tar.addfile(info)
    done = do_import(store, oci_layout(tmp_path / "trap", [BASE, out.getvalue()]))
    again = do_import(store, tmp_path / "trap", parse_name("x:1"))
    assert again.base.digest == done.base.digest and again.reused == 2
    trap = layer_listing(store, done.base.digest)[b"trap"]
    assert trap[6] == ((b"user.kept", b"yes"),)
    assert any("trusted.dsec" in note for note in done.notes)


def test_a_conflict_of_either_name_makes_no_name(
    store: DirectoryStore, layout: Path, tmp_path: Path
) -> None:
    do_import(store, layout)
    refs = [i.key for i in store.list("refs/")]
    other = oci_layout(tmp_path / "other", [BASE])
    with pytest.raises(Conflict):
        do_import(store, other)
    Catalog(store).remove_ref(NAME.with_kind("env"))
    with pytest.raises(Conflict):
        do_import(store, other)
    assert [i.key for i in store.list("refs/")] == [r for r in refs if "/env/" not in r]


def test_an_error_in_one_layer_ends_all(store: DirectoryStore, tmp_path: Path) -> None:
    hostile = layer_tar([("../outside", b"evil")])
    layout = oci_layout(tmp_path / "hostile", [BASE, hostile, TOP])
    with pytest.raises(UnsafeArchive, match="outside"):
        do_import(store, layout)
    assert list(store.list("refs/")) == [] and list(store.list("leases/")) == []
    assert not [t for t in threading.enumerate() if t.name.startswith(("import", "pack"))]


def test_a_layer_that_lies_about_its_content(store: DirectoryStore, layout: Path) -> None:
    blobs = sorted((layout / "blobs" / "sha256").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(blobs[-1].read_bytes())
    data[len(data) // 2] ^= 1
    blobs[-1].write_bytes(data)
    with pytest.raises((Corrupt, BadInput)):
        do_import(store, layout)
    assert list(store.list("refs/")) == []


def test_bad_names_are_refused(store: DirectoryStore, layout: Path) -> None:
    for bad in ("toolkit/x:1", "x@stable"):
        with pytest.raises(BadInput):
            do_import(store, layout, parse_name(bad))
    assert list(store.list("")) == []


def test_a_platform_that_is_none(store: DirectoryStore) -> None:
    image = Image("test", ImageConfig(Platform("linux", "")), ())
    with pytest.raises(BadInput, match="platform"):
        import_image(store, image, NAME)


def test_arm64_has_one_name(store: DirectoryStore) -> None:
    image = Image("test", ImageConfig(Platform("linux", "arm64", "v8")), ())
    import_image(store, image, NAME)
    assert Catalog(store).environment_for("swe/django:1", platform="linux/arm64")
    with pytest.raises(NotFound, match="it is for linux/arm64"):
        Catalog(store).environment_for("swe/django:1", platform="linux/amd64")


@pytest.mark.parametrize("step", [*STEPS, "layer objects", "layout:2", "head:3"])
def test_killed_at_any_step(
    store: DirectoryStore, layout: Path, tmp_path: Path, step: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.t3_layers.killed", str(store.root), f"oci:{layout}",
         "swe/django:1", step],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    refs = {i.key.split("/")[1] for i in store.list("refs/")}
    assert refs == {"ref": {"env"}, "base ref": {"env", "base"}}.get(step, set())
    for name in Catalog(store).ls(("env",)):
        # What is visible is whole.
        env = Catalog(store).environment_for(str(name), platform="linux/amd64")
        layer_listing(store, env.base)
    again = do_import(store, layout)
    other = DirectoryStore(tmp_path / "other", create=True)
    assert do_import(other, layout).base.digest == again.base.digest
    assert layer_listing(other, again.base.digest) == layer_listing(store, again.base.digest)
    other.close()


def test_errors_are_ours(store: DirectoryStore) -> None:
    def load(*_: Any) -> Any:
        raise BadInput("layer says no")

    layer = ImageLayer(Digest("0" * 64), 0, load)
    with pytest.raises(DsecfsError, match="says no"):
        import_image(store, Image("t", ImageConfig(Platform("linux", "amd64")), (layer,)), NAME)
