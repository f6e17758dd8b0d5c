# Sourced by tools/test and tools/quickstart: what both need before they start.
#
#   need_packages NAME…   install Debian packages that are missing (as root)
#   need_venv DIR EXTRA   a virtual environment with this project and an extra ("" for none)
#
# Both do nothing when nothing is missing.
# shellcheck shell=bash

say() { printf '== %s\n' "$*" >&2; }

need_packages() {
    local missing=() name
    for name in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed ||
            missing+=("$name")
    done
    if ((${#missing[@]} == 0)); then return; fi
    if ((EUID != 0)); then
        say "missing packages, and this is not root: apt-get install ${missing[*]}"
        return 1
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
        apt-get update -qq
        apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
    }
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$name"
            return
        fi
    done
    say "no Python 3.11 or newer: apt-get install python3"
    return 1
}

need_venv() {
    local venv=$1 extra=$2 python stamp
    python=$(find_python)
    stamp=$venv/.installed
    # What was installed with the tests' extra serves for everything.
    if [[ -x $venv/bin/python ]] && grep -qxF -e "$(stamp_of "$python" "$extra")" \
        -e "$(stamp_of "$python" dev)" "$stamp" 2>/dev/null; then return; fi
    say "making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
    stamp_of "$python" "$extra" >"$stamp"
}

stamp_of() {
    printf '%s %s %s %s\n' "$("$1" --version)" "$2" "$PWD" "$(sha256sum <pyproject.toml)"
}

# What dsec runs with, and what pyfuse3 is built with.
RUN_PACKAGES=(ca-certificates catatonit crun e2fsprogs fuse3 gcc iproute2 libfuse3-dev lxcfs
    mmdebstrap nftables pkg-config python3-dev python3-venv)
# What tests compare with or make their inputs with.
TEST_PACKAGES=(acl attr busybox-static bzip2 docker-registry erofs-utils git libcap2-bin lz4 skopeo
    umoci xz-utils zstd)
