#!/usr/bin/env bash
# compute-sanitizer's memcheck over the slab's virtual-rank tests on one GPU, in bounded time.
#
#   launch/sanitize.sh [DIRECTORY] [SECONDS] [PYTEST ARGUMENTS...]
#
# DIRECTORY: for <date>_<device>x<n>_memcheck.json and the log, default results/. SECONDS: default 120.
# No installation is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${1:-results}
seconds=${2:-120}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m moe_comm.launch.sanitize "$directory" "$seconds" "$@"
