#!/usr/bin/env bash
# Launches on the workers of an MPIJob, which the operator lists in a file.
# usage: deploy/launch.sh ARGUMENT…      (those of cloudtrain launch, without -np and -H)
set -euo pipefail
cd "$(dirname "$0")/.."
hostfile=${HOSTFILE:-/etc/mpi/hostfile}
hosts=$(awk '{ sub(/^slots=/, "", $2); printf "%s%s:%s", comma, $1, $2; comma = "," }' "$hostfile")
ranks=$(awk '{ sub(/^slots=/, "", $2); ranks += $2 } END { print ranks }' "$hostfile")
unset "${!OMPI_MCA_orte_@}" # the operator sets parameters of Open MPI 4, which name the same file
exec .venv/bin/cloudtrain launch -np "$ranks" -H "$hosts" "$@"
