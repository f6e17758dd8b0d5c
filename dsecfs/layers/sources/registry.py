"""Source: an image in a registry (docker://…), brought here by skopeo(1).

What must hold: skopeo gets a deadline; what it fetched is verified again as any OCI layout;
no credential comes into a message; the temporary layout is gone when the image is closed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile

from dsecfs.errors import (
    BadInput,
    DeadlineExceeded,
    DsecfsError,
    NotFound,
    StoreDenied,
    StoreUnavailable,
    Unsupported,
)
from dsecfs.layers.sources.image import Image, Platform, RegistryOptions
from dsecfs.layers.sources.oci import DirectoryFiles, image_of_layout

_REFERENCE = re.compile(
    r"docker://(?:[a-zA-Z0-9.-]+(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?)"
    r"(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?\Z"
)
"""HOST[:PORT]/NAME[:TAG][@DIGEST] after docker's distribution reference grammar."""

_SECRETS = re.compile(
    r"(?i)(//)[^/@\s]+@"
    r"|((?:token|password|secret|authorization)[\"']?[=:]\s*)(?:(?:bearer|basic)\s+)?\S+"
    r"|((?:bearer|basic)\s+)\S+"
)


_DENIED = re.compile(r"(?i)unauthorized|authentication required|denied|status (?:code )?40[13]")
_AWAY = re.compile(
    r"(?i)connection re(?:fused|set)|no such host|no route|network is unreachable|timeout|EOF"
    r"|server misbehaving|too ?many ?requests|status (?:code )?(?:429|5\d\d)|service unavailable"
)
"""Go's and the registry API's words for what asking again, or other credentials, may cure."""


def open_registry(spec: str, *, platform: Platform | None, options: RegistryOptions) -> Image:
    """Copy the image to a temporary OCI layout and open that; see `image.open_image`."""
    if not _REFERENCE.match(spec):
        raise BadInput(
            f"not an image reference: {_scrub(spec[:200])!r}",
            hint="expected docker://HOST/NAME:TAG; credentials belong in the authfile",
        )
    program = shutil.which("skopeo")
    if program is None:
        raise Unsupported(
            "cannot read from a registry without skopeo", hint="apt-get install skopeo"
        )
    wanted = platform or Platform.here()
    place = tempfile.mkdtemp(prefix="dsec-image-", dir=options.scratch)
    try:
        command = [program, "copy", "--quiet", "--override-os", wanted.os]
        command += ["--override-arch", wanted.architecture]
        if wanted.variant:
            command += ["--override-variant", wanted.variant]
        if options.authfile is not None:
            command += ["--authfile", str(options.authfile)]
        command += [f"--src-tls-verify={str(options.tls_verify).lower()}"]
        command += [spec, f"oci:{place}/layout:image"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=options.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{spec}: not copied within {options.timeout_s:g} s") from None
        if done.returncode:
            raise _failure(spec, done.stderr)
        image = image_of_layout(spec, DirectoryFiles(f"{place}/layout"), "image", platform)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return Image(spec, image.config, image.layers, lambda: shutil.rmtree(place, ignore_errors=True))


def _scrub(text: str) -> str:
    return _SECRETS.sub(lambda m: "".join(g for g in m.groups() if g) + "…", text)


def _failure(spec: str, stderr: bytes) -> DsecfsError:
    """What skopeo said, in one line, without secrets, as an error of ours."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
    said = re.search(r'msg="(.*)"', lines[-1])
    text = _scrub(said[1].replace('\\"', '"') if said else lines[-1])[:500]
    if "manifest unknown" in text or "name unknown" in text or "no image found" in text:
        return NotFound(f"{spec}: not in the registry: {text}")
    message = f"{spec}: skopeo cannot copy it: {text}"
    if "HTTP response to HTTPS client" in text or "x509" in text:
        return BadInput(
            message, hint="the registry has no valid TLS; --no-tls-verify if that is intended"
        )
    if _DENIED.search(text):
        return StoreDenied(message, hint="check the name and the credentials (--authfile)")
    if _AWAY.search(text):
        return StoreUnavailable(message, hint="check the registry's name and the network")
    return BadInput(message, hint="check the name, the network and the credentials file")
