#!/usr/bin/env bash
# moe-bench under torchrun, on one host or several. Arguments are moe-bench's.
#
#   launch/torchrun.sh run --preset kimi-k3 --num-tokens 128,4096
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 launch/torchrun.sh check      # and NODE_RANK=1 on host1
#
# NPROC: ranks on this host (default: its GPUs, or 2 on a CPU). MASTER_PORT: default 29500.
set -euo pipefail

if [ -z "${NPROC:-}" ]; then
    NPROC=$(python3 -c 'import torch; print(torch.accelerator.device_count() or 2)')
fi
if [ "${NNODES:-1}" = 1 ]; then
    exec torchrun --standalone --nproc-per-node "$NPROC" -m moe_comm.launch.cli "$@"
fi
exec torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:?set NODE_RANK to 0..NNODES-1}" \
    --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first host}" \
    --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "$NPROC" -m moe_comm.launch.cli "$@"
