#!/usr/bin/env bash
# Runs the benches and keeps what they measured: benchmarks/results/DATE-NAME.jsonl, one JSON object a line.
# Words are passed on to both: scripts/bench.sh --quick
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
for bench in selection reducers; do
    file="benchmarks/results/$(date +%F)-$bench.jsonl"
    echo "cloudtrain: bench $bench, into $file" >&2
    .venv/bin/cloudtrain bench "$bench" --json "$@" >"$file"
done
