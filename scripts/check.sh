#!/usr/bin/env bash
# Style and types, as test.sh checks them first.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
