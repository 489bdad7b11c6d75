#!/usr/bin/env bash
# Makes .venv with everything cloudtrain needs, and Horovod where there is a C++ compiler. Quick when nothing changed.
# usage: scripts/install.sh [EXTRA] [--without-horovod]
# EXTRA: an extra of pyproject.toml that includes train: train itself, dev (whose tests need Horovod) or gpu;
#        or frameworks, which makes .venv-frameworks: commlib with PyTorch and JAX, and what tests/torch and tests/jax need;
#        or oldest or newest, which make .venv-oldest and .venv-newest: the two ends of what is supported, without Horovod
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv="$root/.venv"
extra=train horovod=yes
for word; do
    case $word in --without-horovod) horovod=no ;; *) extra=$word ;; esac
done
candidates=(python3 python3.13 python3.12 python3.11 python3.10)
case $extra in
frameworks) packages=(-e "$root[torch,jax]" torch==2.13.0 optax hypothesis pytest pytest-timeout rich scikit-learn) ;;
oldest)
    packages=(-e "$root[dev]" "tensorflow==2.18.*" "keras==3.10.*" "numpy==1.26.*" "numba==0.60.*")
    candidates=(python3.10 "${candidates[@]}")
    ;;
newest)
    packages=(-e "$root[dev]")
    candidates=(python3.13 "${candidates[@]}")
    ;;
*) packages=() ;;
esac
[ ${#packages[@]} = 0 ] || venv="$root/.venv-$extra" horovod=no
say() { printf 'cloudtrain: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

exec 9>"$venv.lock"
flock 9 # quickstart.sh and test.sh may be started side by side

horovod_script="$root/training/process/install_horovod.sh"
stamp_file="$venv/.installed-$extra"
stamp=$(cat "$root"/{pyproject.toml,setup.py} "$root/scripts/install.sh" "$horovod_script" <(echo "$root ${PYTHON:-}") | sha256sum)
has() { cat "$@" 2>/dev/null | grep -qF "$stamp" && "$venv/bin/python" -c '' 2>/dev/null; }
# every environment is one to train in
stamps=("$stamp_file")
[ "$extra" != train ] || stamps=("$venv"/.installed-*)
is_made=no
! has "${stamps[@]}" || is_made=yes
! has "$venv/.horovod-installed" || horovod=no
[ "$is_made$horovod" != yesno ] || exit 0

# --- what must be on the machine; asked before anything is downloaded
case $root in *[[:space:]]*) die "the folder $root has a space in its path, which MPI's compiler cannot handle: move it" ;; esac
[ -n "${HOME:-}" ] || die "needs HOME, found none: set it to a folder that can be written"
python=
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1 || true)
    die "needs Python 3.10 to 3.13, found ${found:-none}: install one (apt-get install python3) or name it with PYTHON=/path/to/python3.11"
fi
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheels="$(realpath -m "${XDG_CACHE_HOME:-$HOME/.cache}")/cloudtrain/wheels"
compiler="a C++ compiler to build Horovod: apt-get install g++"
if [ $horovod = yes ] && ! command -v g++ >/dev/null && ! ls "$wheels"/*/horovod-*-"$tag"-*.whl >/dev/null 2>&1; then
    [ "$extra" != dev ] || die "needs $compiler"
    horovod=missing
fi
need_space() { # FOLDER GIB
    { mkdir -p "$1" 2>/dev/null && [ -w "$1" ]; } || die "cannot write to $1: make it writable"
    local free=$(($(df -Pk "$1" | awk 'NR == 2 { print $4 }') / 1048576))
    [ "$free" -ge "$2" ] || die "needs $2 GiB of free disk in $1, found $free GiB: make room there"
}
[ -e "$venv/bin/cloudtrain" ] || need_space "$root" "$([ "$extra" = gpu ] && echo 12 || echo 4)"
need_space "${TMPDIR:-/tmp}" 1
[ $horovod != yes ] || need_space "$wheels" 0

# --- the environment
if [ "$(cat "$venv/.made-for" 2>/dev/null)" != "$root $tag" ]; then
    say "making $(basename "$venv") with $("$python" --version)"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$venv"
    else # Debian ships Python without it; pip's own wheel needs no root
        "$python" -m venv --clear --without-pip "$venv"
        problem=$("$venv/bin/python" "$root/scripts/bootstrap_pip.py" 2>&1) ||
            die "cannot get pip ($problem): apt-get install python3-venv, then try again"
    fi
    echo "$root $tag" >"$venv/.made-for"
fi
log="$venv/install.log"
logged() { "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; die "failed: $* (everything it said: $log)"; }; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ ${#packages[@]} -gt 0 ]; then
    say "installing ${packages[*]:1}"
    logged pip install "${packages[@]}"
    echo "$stamp" >"$stamp_file"
    exit 0
fi
if [ $is_made = no ]; then
    say "installing TensorFlow, Open MPI 5 and the rest (about 700 MB, a minute or two)"
    rm -f "$venv/.horovod-installed" # it is of the TensorFlow that was there
    logged pip install -e "$root[$extra]"
    say "compiling CPU kernels (about 30 s; cached for later runs)"
    (cd "$root" && logged "$venv/bin/python" -m training.process.compile_kernels)
    echo "$stamp" >"$stamp_file"
fi
if [ $horovod = yes ]; then
    exec 8>&2
    logged bash "$horovod_script" "$venv/bin/python" "$wheels"
    echo "$stamp" >"$venv/.horovod-installed"
elif [ $horovod = missing ]; then
    say "Horovod is left out, which nothing but horovodrun needs: ./scripts/install.sh needs $compiler"
fi
say "ready: .venv (activate it with: source .venv/bin/activate)"
