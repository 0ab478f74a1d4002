#!/usr/bin/env bash
# DeepEP V1 on a pair of GPUs, in about two minutes: it by itself beside the adapted one, its own
# errors at 896 experts, and the main job with every backend.
#
#   launch/deepep_pair.sh [DIRECTORY] [SITE] [tests]
#
# DIRECTORY: for the results, default results/. SITE: a folder with an unpacked tokenspeed-deepep
# wheel, where deep_ep is not installed. Its native part finds NVSHMEM through the loader's path.
# "tests": also tests/test_deepep_gpu.py, in up to three minutes more.
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
    timeout -k 10 "$1" "${@:2}" && return
    echo "== failed: exit code $?" >&2
    status=1
    return 1
}
run() { # SECONDS BACKENDS TOKENS NAME OPTIONS...
    step "$1" python3 -m moe_comm.launch.cli run --device cuda --nproc 2 --wire bf16 \
        --backend "$2" --num-tokens "$3" --iters 40 --json "${prefix}-$4.json" "${@:5}"
}

step 60 python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m moe_comm.launch.deepep_stock "${prefix}-stock.json"
# Both modes of deepep are meant where none is named. Should they not go together, each is run by
# itself, the low-latency one eagerly: its buffers are then made once a process.
if ! run 100 slab,deepep,c10d 1,128,4096 run --no-baseline; then
    run 50 slab,deepep:v1-ht,c10d 1,128,4096 run-ht --no-baseline --no-limit
    for tokens in 1 128 4096; do
        run 35 deepep:v1-ll "$tokens" "run-ll-$tokens" --no-baseline --no-limit --no-cuda-graph
    done
fi
if [ "${3:-}" = tests ]; then
    step 170 python3 -m pytest -q -x -p no:cacheprovider tests/test_deepep_gpu.py
fi
exit "$status"
