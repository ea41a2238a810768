#!/usr/bin/env bash
# Runs the fairseq tests against the official release, fairseq 0.12.2 on Python 3.10. Not part of CI.
#
#   tests/fairseq_official.sh [PATH ...] [pytest options]     default: tests/fairseq_plugin
#
# PYTHON names the Python 3.10 (default python3.10). Its environment is made in OFFICIAL_ENV and kept,
# or without it in a temporary folder. Record the result in docs/log.md.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:--}" in -*) set -- tests/fairseq_plugin "$@" ;; esac
env=${OFFICIAL_ENV:-$(mktemp -d)/env}
[ -n "${OFFICIAL_ENV:-}" ] || trap 'rm -rf "$(dirname "$env")"' EXIT
if [ ! -e "$env/ready" ]; then
  "${PYTHON:-python3.10}" -m venv "$env"
  # Later versions of pip refuse the metadata of the omegaconf that 0.12.2 asks for.
  "$env/bin/python" -m pip install --quiet 'pip<24.1' wheel
  "$env/bin/python" -m pip install --quiet \
    'fairseq==0.12.2' 'numpy<2' torch sentencepiece tqdm pytest
  touch "$env/ready"
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 \
  "$env/bin/python" -m pytest -p no:cacheprovider "$@"
