#!/usr/bin/env bash
# Makes .venv (see install.sh), checks style and types, and runs every test.
# With arguments, runs only pytest with them: scripts/test.sh -k hitopk
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
./scripts/check.sh
.venv/bin/python -m pytest -q --numprocesses auto --dist worksteal -m "not launch and not cluster"
# These start processes of their own, as many as there are cores and more: one after the other.
exec .venv/bin/python -m pytest -m "launch or cluster"
