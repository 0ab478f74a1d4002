#!/usr/bin/env bash
# The whole matrix of this host's GPUs, resumed until it is done: predictions, peer copies, every
# backend, the MoE layer, the slab against compacted variants, lost ranks, five minutes of random
# calls. launch/matrix.py says more; its options follow the file.
#
#   launch/matrix.sh [FILE] [OPTIONS...]
#
# FILE: default results/<date>_<device>x<n>_matrix.json. One call runs at most --seconds (default 540)
# and exits with 124 while tasks are left; then call it again with the same FILE. No installation is
# needed. MOE_COMM_COMMIT names the commit of a copied tree.
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    file=$1
    shift
else
    name=$(python3 -c 'import torch; n = torch.cuda.device_count()
print((torch.cuda.get_device_name(0) if n else "cpu").lower().replace(" ", "-") + f"x{n or 2}")')
    file=results/$(date -u +%F)_${name}_matrix.json
fi
exec python3 -m moe_comm.launch.matrix --out "$file" "$@"
