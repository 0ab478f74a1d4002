#!/usr/bin/env bash
# The main job on the GPUs of this host: every mode checked, then timed, captured where it can be and
# eager, against per-expert and the machine's limits.
#
#   launch/gpu_run.sh [DIRECTORY] [BACKENDS] [TOKENS]
#
# Writes <date>_<device>x<n>_run.json, ..._run-eager.json and ..._check.json into DIRECTORY (default
# results). No installation is needed. Each step ends within 170 s, so all do within 9 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${1:-results}
backends=${2:-c10d:exact,c10d:dense}
tokens=${3:-1,128,4096}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$directory"
count=$(python3 -c 'import torch; print(torch.cuda.device_count())')
name=$(python3 -c 'import torch; print(torch.cuda.get_device_name(0).lower().replace(" ", "-"))')
prefix=$directory/$(date -u +%F)_${name}x$count

bench() { timeout -k 10 170 python3 -m moe_comm.launch.cli "$@" --device cuda --nproc "$count"; }
status=0
bench check --backend "$backends" --json "${prefix}_check.json" -q || status=$?
bench run --backend "$backends" --num-tokens "$tokens" --json "${prefix}_run.json" || status=$?
bench run --backend "$backends" --num-tokens "$tokens" --no-cuda-graph \
    --json "${prefix}_run-eager.json" || status=$?
exit "$status"
