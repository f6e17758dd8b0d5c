"""Images that the benchmarks run: real ones, built from Debian's and PyPI's packages.

Owns a cache directory that is safe to delete. `science_image` is the image of the cold
start benchmark: two layers, Debian with Python, then numpy, scipy, pandas, pyarrow,
scikit-learn and matplotlib (some 935 MB unpacked). `variant_image` adds one layer of
incompressible files that no other variant shares.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

SCIENCE = ("numpy", "scipy", "pandas", "pyarrow", "scikit-learn", "matplotlib")
SITE = "usr/local/lib/python3.11/dist-packages"
BASE_PACKAGES = "python3,git,ca-certificates"
BUILD_LIMIT_S = 900


def run(*argv: str | Path, cwd: Path | None = None, limit_s: int = BUILD_LIMIT_S) -> None:
    """Run a build step; its output is shown only when it fails."""
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, capture_output=True, timeout=limit_s, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace")[-4000:])
        raise SystemExit(f"build step failed ({done.returncode}): {argv[0]}")


def base_tar(cache: Path) -> Path:
    """A Debian 12 root with Python and git, by mmdebstrap."""
    tar = cache / "base.tar"
    if not tar.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / "base.part.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", part)
        part.rename(tar)
    return tar


def science_files(cache: Path) -> Path:
    """A directory that holds what the second layer adds, rooted at /."""
    root = cache / "science"
    if not root.exists():
        part = cache / "science.part"
        shutil.rmtree(part, ignore_errors=True)
        site = part / SITE
        site.mkdir(parents=True)
        run(
            sys.executable, "-m", "pip", "install", "--quiet", "--no-compile",
            "--target", site, *SCIENCE,
        )  # fmt: skip
        run(sys.executable, "-m", "compileall", "-q", "-s", part, "-p", "/", site)
        part.rename(root)
    return root


def layout(cache: Path, name: str, base: Path, extra: Path | None) -> Path:
    """An OCI layout at cache/NAME with one tag, `latest`, of one or two gzip layers."""
    target = cache / name
    if target.exists():
        return target
    part = cache / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    blobs = part / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers, diff_ids = [], []
    for source in (base, extra):
        if source is None:
            continue
        raw = source
        if source.is_dir():
            raw = cache / f"{name}.layer.tar"
            run(
                "tar", "--sort=name", "--owner=0", "--group=0", "--numeric-owner",
                "-cf", raw, "-C", source, ".",
            )  # fmt: skip
        diff_ids.append("sha256:" + _sha256(raw))
        packed = raw.with_suffix(".tar.gz")
        if not packed.exists():
            _gzip(raw, packed)
        digest, size = _sha256(packed), packed.stat().st_size
        os.link(packed, blobs / digest)
        layers.append(
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": "sha256:" + digest,
                "size": size,
            }
        )
        if source.is_dir():
            raw.unlink()
            packed.unlink()
    config = _put(
        blobs,
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Cmd": ["/bin/bash"],
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        },
    )
    manifest = _put(
        blobs,
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **config},
            "layers": layers,
        },
    )
    (part / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (part / "index.json").write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "manifests": [
                    {
                        "mediaType": "application/vnd.oci.image.manifest.v1+json",
                        "annotations": {"org.opencontainers.image.ref.name": "latest"},
                        **manifest,
                    }
                ],
            }
        )
    )
    part.rename(target)
    return target


def science_image(cache: Path) -> Path:
    """The 935 MB image of the cold start benchmark, as an OCI layout."""
    return layout(cache, "oci-science", base_tar(cache), science_files(cache))


def variant_image(cache: Path, number: int, megabytes: int = 40) -> Path:
    """Variant NUMBER: the common base plus `megabytes` that no other variant has.

    The private layer holds a program `/opt/app/main.py` that imports a few of its own
    modules and reads some of its data, so that a run touches both layers.
    """
    root = cache / f"variant-{number}"
    if not root.exists():
        part = cache / f"variant-{number}.part"
        shutil.rmtree(part, ignore_errors=True)
        app = part / "opt" / "app"
        app.mkdir(parents=True)
        source = random.Random(number)
        for i in range(megabytes):
            (app / f"data{i:03d}.bin").write_bytes(source.randbytes(1 << 20))
        for i in range(200):
            (app / f"mod{i:03d}.py").write_text(f"VALUE = {source.random()!r}\n" * 200)
        (app / "main.py").write_text(
            "import sys; sys.path.insert(0, '/opt/app')\n"
            "import hashlib\n"
            + "".join(f"import mod{i:03d}\n" for i in range(0, 200, 10))
            + "for i in range(3):\n"
            "    hashlib.sha256(open(f'/opt/app/data{i:03d}.bin', 'rb').read()).hexdigest()\n"
            "print('ready', flush=True)\n"
        )
        part.rename(root)
    made = layout(cache, f"oci-variant-{number}", base_tar(cache), root)
    shutil.rmtree(root, ignore_errors=True)
    return made


def _gzip(raw: Path, packed: Path) -> None:
    part = packed.with_suffix(".part")
    with part.open("wb") as out:
        subprocess.run(
            ["gzip", "-6", "-n", "-c", raw], stdout=out, check=True, timeout=BUILD_LIMIT_S
        )
    part.rename(packed)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _put(blobs: Path, value: object) -> dict[str, object]:
    data = json.dumps(value, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


if __name__ == "__main__":
    where = Path(os.environ.get("DSEC_BENCH_CACHE", "/var/tmp/dsec-bench"))
    print(science_image(where))
