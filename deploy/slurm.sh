#!/usr/bin/env bash
# Trains on the nodes of a Slurm job, and goes on where it was stopped.
# usage: sbatch deploy/slurm.sh CONFIG [KEY=VALUE…]      (checkpoints among them; in the folder that has .venv)
#SBATCH --job-name=cloudtrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@90
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM comes to all ranks 90 s before the time is over, and where the job is pre-empted: they make a checkpoint
# and exit with status 75.
set -u
most_restarts=5
[ $# -gt 0 ] || { echo "usage: sbatch $0 CONFIG [KEY=VALUE…]" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
trap : TERM # where it comes to this script, too: srun is waited for

srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    .venv/bin/cloudtrain train "$@" resume=auto
status=$?

case $status in
0 | 2) exit "$status" ;;  # done, or a usage error, which no restart mends
75) ;;                    # stopped with a checkpoint
*) [ "${SLURM_RESTART_COUNT:-0}" -lt "$most_restarts" ] || exit "$status" ;;
esac
echo "cloudtrain: status $status: the job $SLURM_JOB_ID is queued again"
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
