#!/usr/bin/env bash
# sbatch --nodes=4 launch/slurm.sh configs/CONFIG.yaml [--key=value ...]
#
# One task per GPU: JAX finds the other tasks through SLURM's own variables and gives each task its GPU.
# The same arguments go to every task. Options of sbatch on its command line win over the ones below.
#SBATCH --job-name=moejax
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# A run that gets SIGTERM saves and leaves with code 75. SLURM sends it before the time limit and on preemption.
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: sbatch launch/slurm.sh CONFIG [--key=value ...]" >&2
    exit 2
fi

# MOEJAX_VENV: an environment on a file system that every node sees.
export PATH="${MOEJAX_VENV:-$PWD/.venv}/bin:$PATH"

code=0
# When one task is gone the others get two minutes: to finish a checkpoint, or to notice.
srun --kill-on-bad-exit=0 --wait=120 moejax train "$@" || code=$?

if [[ $code -eq 75 ]]; then
    echo "saved; requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
