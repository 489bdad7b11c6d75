#!/usr/bin/env bash
# Lint and types, as the tests also check them.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
