#!/usr/bin/env bash
# DeepEP on a pair of GPUs, within 9 minutes: what it offers, the adapters against the reference, its
# own errors and times beside theirs, and the main job with every backend. Not run yet.
#
#   launch/deepep_pair.sh [DIRECTORY] [SITE]
#
# DIRECTORY: for the results, default results/. SITE: a folder with an unpacked tokenspeed-deepep
# wheel, where deep_ep is not installed. Its native part finds NVSHMEM through the loader's path.
set -uo pipefail
cd "$(dirname "$0")/.."

directory=${1:-results}
site=${2:-}
export PYTHONPATH=$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}
nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
if [ -n "$nvidia" ]; then
    export LD_LIBRARY_PATH=$nvidia/nvshmem/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
mkdir -p "$directory"
name=$(python3 -c 'import torch; print(torch.cuda.get_device_name(0).lower().replace(" ", "-"))')
prefix=$directory/$(date -u +%F)_${name}x2_deepep
status=0
step() { # SECONDS COMMAND...
    echo "== ${*:2}" >&2
    timeout -k 10 "$1" "${@:2}" || { echo "== failed: exit code $?" >&2; status=1; }
}

step 60 python3 -m moe_comm.launch.cli list --ep 2 --json >"${prefix}-list.json"
step 170 python3 -m pytest -q -x -p no:cacheprovider tests/test_deepep_gpu.py
step 110 python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m moe_comm.launch.deepep_stock "${prefix}-stock.json"
step 160 python3 -m moe_comm.launch.cli run --device cuda --nproc 2 --wire bf16 \
    --backend slab,deepep:v1-ht,deepep:v1-ll,c10d --num-tokens 1,128,4096 \
    --json "${prefix}-run.json"
exit "$status"
