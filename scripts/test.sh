#!/usr/bin/env bash
# Makes .venv (see install.sh), checks style and types, and runs every test.
# With arguments, runs only pytest with them: scripts/test.sh -k hitopk
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
[ $# -gt 0 ] || ./scripts/check.sh
exec .venv/bin/python -m pytest "$@"
