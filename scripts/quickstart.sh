#!/usr/bin/env bash
# Makes .venv (see install.sh) and trains on real data: four ranks as two emulated nodes, sparse, then dense. Then
# builds Horovod, for horovodrun. Words key=value change the configuration: scripts/quickstart.sh reducer.density=0.05
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh --without-horovod
echo "cloudtrain: training, with: cloudtrain launch -np 4 configs/digits.yaml${*:+ $*}" >&2
.venv/bin/cloudtrain launch -np 4 configs/digits.yaml "$@"
./scripts/install.sh
