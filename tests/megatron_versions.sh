#!/usr/bin/env bash
# Runs the Megatron layer, spec and diagnostics tests against other releases of megatron-core. Not part
# of CI.
#
#   tests/megatron_versions.sh [VERSION ...]     default: 0.16.1 0.17.1 0.18.2 0.19.2
#
# Each release is installed without its dependencies into a folder of its own, in front of the
# environment made by `make env` (PYTHON chooses another). Record the result in docs/log.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-${NORMPLUGIN_ENV:-.venv}/bin/python}
[ $# -gt 0 ] || set -- 0.16.1 0.17.1 0.18.2 0.19.2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
status=0
for version in "$@"; do
  "$python" -m pip install --quiet --no-deps --target "$folder/$version" "megatron-core==$version"
  echo "== megatron-core $version"
  PYTHONPATH="$folder/$version:$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 \
    "$python" -m pytest -p no:cacheprovider tests/megatron_plugin/test_megatron_layers.py \
    tests/megatron_plugin/test_megatron_specs.py \
    tests/megatron_plugin/test_megatron_tensor_parallel.py \
    tests/diagnostics/test_megatron_map.py tests/diagnostics/test_diagnostics_megatron.py || status=1
done
exit $status
