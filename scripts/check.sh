#!/usr/bin/env bash
# Style and types, as test.sh checks them first.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
. scripts/stages.sh
stage .venv/bin/ruff check .
stage .venv/bin/ruff format --check --quiet .
stage .venv/bin/mypy
report
