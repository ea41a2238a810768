#!/usr/bin/env bash
# The papers' claims at a size that a CPU trains: every arm with the same learning rates.
#
#   examples/claims/run.sh [FOLDER]      default: claims; needs normplugin[fairseq,report]
#
# About four hours of one core. It goes on where it was stopped, and the comparisons may be run
# side by side. Writes FOLDER/note/README.md and its pictures; docs/claims/ is such a note.
set -euo pipefail
out=${1:-claims}
deep="--size ${SIZE:-12x64x2} --updates ${UPDATES:-300}"
shared="--data $out/data --threads 1"
seeds="--seeds ${SEEDS:-1,2,3}"
here=$(dirname "$0")

# Without TEXT, a file, the text is the running Python's standard library.
normplugin prepare ${TEXT:-} --out "$out/data" --frameworks fairseq \
  --vocab-size "${VOCAB:-2000}" --valid-fraction 0.02

# Every learning rate with one seed; then those that were best for some arm, with every seed.
arms="--validations 3 --arms ${ARMS:-postln,periln,normformer,A+C,B}"
normplugin compare --out "$out/rates" $deep $shared $arms --lr "${WIDE:-3e-4,1e-3,3e-3,1e-2,3e-2}"
[ -d "$out/lm" ] || cp -r "$out/rates" "$out/lm"
normplugin compare --out "$out/lm" $deep $shared $seeds $arms --lr "${RATES:-1e-3,3e-3,1e-2}"

# Four times as long, at the rate that was best for these.
normplugin compare --out "$out/long" --size "${SIZE:-12x64x2}" --updates "${LONG:-1200}" $shared \
  --seeds "${LONG_SEEDS:-1,2}" --lr 1e-2 --validations 6 --arms periln,normformer

# The learning rate grows until the loss explodes.
normplugin compare --out "$out/ramp" $deep $shared $seeds --lr-ramp 1.5 --validations 1 \
  --arms "${RAMP_ARMS:-postln,periln,normformer,normformer+residual-scale}"

# Masked language models learn later: in 300 updates, 12 layers learn how often each piece occurs.
masked="--kind mlm --size ${MLM_SIZE:-4x64x2} --updates ${MLM_UPDATES:-600} --validations 3"
masked+=" --arms ${MLM_ARMS:-postln,periln,normformer}"
normplugin compare --out "$out/mlm-rates" $masked $shared --lr "${MLM_WIDE:-3e-4,1e-3,3e-3,1e-2}"
[ -d "$out/mlm" ] || cp -r "$out/mlm-rates" "$out/mlm"
normplugin compare --out "$out/mlm" $masked $shared $seeds --lr "${MLM_RATES:-1e-3,3e-3}"

python "$here/note.py" "$out" "$out/note"
