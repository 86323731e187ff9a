#!/usr/bin/env bash
# Checks and measures all that needs a GPU, in ten minutes on one H100 or H200:
#
#     bash bench/gpu.sh                        what a round is on a GPU, and how fast
#     bash bench/gpu.sh --device cpu --tiny    the script itself, on any machine
#
# Needs no network: $PYTHON (default .venv/bin/python) with a CUDA build of torch, and the demo pair that `make demo`
# leaves in demo/. Exit code 0: every check passed; 1: one failed; 124: ten minutes were not enough.
#
# This script has never run on a GPU. (Whoever runs it there removes this line, and the note below.)
set -euo pipefail
echo "note: this script has never run on a GPU; its checks are what its authors expect of one" >&2

cd "$(dirname "$0")/.."
export TORCHINDUCTOR_CUDAGRAPH_OR_ERROR=1  # what cannot become a CUDA graph is an error, not a slower run
export HF_HUB_OFFLINE=1
exec timeout 600 "${PYTHON:-.venv/bin/python}" -m bench.gpu "$@"
