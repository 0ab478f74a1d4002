#!/usr/bin/env bash
# moe-bench on a Slurm cluster, a task a host, each of which starts its ranks with torchrun.
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh run --preset kimi-k3 --num-tokens 128,4096
#
# Run from the directory that holds this checkout, with the environment that has moe_comm active.
#SBATCH --job-name=moe-bench
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=00:30:00
set -euo pipefail

export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
export MASTER_PORT=${MASTER_PORT:-29500}
export NNODES=$SLURM_NNODES
# SLURM_NODEID is known inside a task alone, so it is read there.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec launch/torchrun.sh "$@"' bash "$@"
