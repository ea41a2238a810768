#!/usr/bin/env bash
# Runs the fairseq tests against the official release, fairseq 0.12.2 on Python 3.10. Not part of CI.
#
#   tests/fairseq_official.sh [PATH ...] [pytest options]
#
# Default: the plugin, the diagnostics and the comparison, about half an hour on one core.
#
# PYTHON names the Python 3.10 (default python3.10). Its environment is made in OFFICIAL_ENV and kept,
# or without it in a temporary folder. Record the result in docs/log.md.
set -euo pipefail
cd "$(dirname "$0")/.."
default=(tests/fairseq_plugin tests/diagnostics/test_diagnostics_fairseq.py
  tests/compare/test_compare_end_to_end.py)
case "${1:--}" in -*) set -- "${default[@]}" "$@" ;; esac
env=${OFFICIAL_ENV:-$(mktemp -d)/env}
[ -n "${OFFICIAL_ENV:-}" ] || trap 'rm -rf "$(dirname "$env")"' EXIT
if [ ! -e "$env/ready" ]; then
  "${PYTHON:-python3.10}" -m venv "$env"
  # Later versions of pip refuse the metadata of the omegaconf that 0.12.2 asks for.
  "$env/bin/python" -m pip install --quiet 'pip<24.1' wheel
  "$env/bin/python" -m pip install --quiet \
    'fairseq==0.12.2' 'numpy<2' torch sentencepiece tqdm pytest \
    tensorboard tensorboardX matplotlib jinja2 scipy
  touch "$env/ready"
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 \
  "$env/bin/python" -m pytest -p no:cacheprovider "$@"
