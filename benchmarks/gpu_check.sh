#!/usr/bin/env bash
# One CUDA GPU, under 8 minutes: parity of the norms, then times and memory beside stock.
#   benchmarks/gpu_check.sh                 needs torch; fairseq, megatron-core, apex where installed
#   benchmarks/gpu_check.sh --device cpu    a dry run of this script, tiny: says nothing of a GPU
# PYTHON=... chooses the interpreter, OUT=... the folder of gpu_check.csv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "${OUT:-out}"
exec timeout --kill-after=10 470 \
  "${PYTHON:-python3}" -m benchmarks.gpu_check --csv "${OUT:-out}/gpu_check.csv" "$@"
