#!/usr/bin/env bash
# The tests of the adapters for PyTorch and JAX, in an environment without TensorFlow.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh frameworks
.venv-frameworks/bin/python -m pytest -q tests/torch tests/jax
