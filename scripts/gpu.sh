#!/usr/bin/env bash
# Runs what needs a GPU and leaves what comes of it in a folder, also from a checkout that is not installed:
#     scripts/gpu.sh FOLDER [STAGE …]
# Stages: facts, kernels (their tests), bench, checks (ranks through NCCL), reducers (their tests). Each has a
# limit of its own, and one that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n 's/^# \?//; 2,5p' "$0" >&2; exit 2; }
out=$1
shift
mkdir -p "$out"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
# Ranks that share a GPU reach each other by sockets, which need no card.
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_DEBUG=WARN
# NCCL as pip installs it is found by nobody else.
nccl=$("$python" -c 'from importlib.util import find_spec as find
print(*find("nvidia.nccl").submodule_search_locations)' 2>/dev/null)/lib
[ -e "$nccl/libnccl.so.2" ] && export LD_LIBRARY_PATH=$nccl:${LD_LIBRARY_PATH:-}

within() { # SECONDS COMMAND…
    local began=$SECONDS
    timeout -k 5 "$@"
    local status=$?
    echo "== status $status after $((SECONDS - began)) of $1 s: ${*:2}" >&2
    return $status
}

tests() { # NAME SECONDS ARGUMENT…
    within "$2" "$python" -m pytest -m gpu -n 8 -q -rfE -p no:cacheprovider --timeout 120 "${@:3}" 2>&1 |
        tee "$out/$1.txt"
}

facts() { { nvidia-smi; "$python" --version; "$python" -m pip list; } > "$out/facts.txt" 2>&1; }

kernels() { tests kernels 170 tests/gpu --ignore tests/gpu/test_on_a_gpu.py; }

bench() {
    within 300 "$python" -m benchmarks.gpu --json \
        2> >(tee "$out/bench.txt" >&2) > "$out/gpu-selection.jsonl"
    # The longest vectors come last: what the limit cuts off is theirs, perhaps in the middle of a line.
    [ -z "$(tail -c 1 "$out/gpu-selection.jsonl")" ] || sed -i '$d' "$out/gpu-selection.jsonl"
}

checks() {
    within 260 "$python" benchmarks/gpu_checks.py --limit 150 2> >(tee "$out/checks.txt" >&2) |
        tee "$out/checks.jsonl" | cut -c1-1500
    grep -q '"failed"' "$out/checks.jsonl" || return 0
    # The smallest sizes again, and all that NCCL says.
    NCCL_DEBUG=INFO within 60 "$python" benchmarks/gpu_checks.py --limit 45 --sizes 1 1000 > "$out/nccl.txt" 2>&1
}

reducers() { tests reducers 280 tests/gpu/test_on_a_gpu.py -k "not through_nccl"; }

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(facts kernels bench checks reducers)
status=0
for stage in "${stages[@]}"; do "$stage" || status=1; done
exit $status
