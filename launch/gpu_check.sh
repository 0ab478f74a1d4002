#!/usr/bin/env bash
# Every test marked gpu or multi_gpu on the GPUs at hand, in bounded time, with a JSON summary.
#
#   launch/gpu_check.sh [DIRECTORY] [SECONDS] [PYTEST ARGUMENTS...]
#
# DIRECTORY: for the summary, default results/. SECONDS: for everything, default 540; the summary is
# written after every test, so what had run by then is in it. No installation is needed.
# MOE_COMM_COMMIT names the commit of a copied tree.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${1:-results}
seconds=${2:-540}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# The kill is for a kernel that hangs: Python cannot interrupt it.
exec timeout -k 10 "$((seconds + 20))" \
    python3 -m moe_comm.launch.gpu_check "$directory" "$seconds" "$@"
