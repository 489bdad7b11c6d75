#!/usr/bin/env bash
# Runs the benches and keeps what they measured: benchmarks/results/DATE-NAME.jsonl, one JSON object a line.
# Words are passed on to all: scripts/bench.sh --quick
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
keep() {
    file="benchmarks/results/$(date +%F)-$1.jsonl"
    echo "cloudtrain: bench ${*:2}, into $file" >&2
    .venv/bin/cloudtrain bench "${@:2}" --json >"$file"
}
keep selection selection "$@"
keep reducers reducers "$@"
keep oktopk-numpy reducers --peers --size 14700000 --steps 8 "$@"
