#!/usr/bin/env bash
# Translation with fairseq, in the recipe of Vaswani et al. 2017 (base).
#
#   train_fairseq_mt.sh SIZE DATA [further fairseq-train options]
#
# SIZE  base: 6 + 6 layers of width 512, for one node of 8 GPUs.
#       tiny: the same recipe at 4 + 4 layers of width 128, a few updates on the CPU.
# DATA  the fairseq folder of `normplugin prepare --source TEXTS --target TEXTS`.
# SCHEME chooses the placement (preln, postln for baselines), PYTHON the interpreter. What the user
# adds at the end wins.
#
# Source: fairseq's examples/scaling_nmt/README.md at the base size. Neither paper trained on
# translation; cross-attention gets the sites of self-attention.
set -euo pipefail

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
here=$(cd "$(dirname "$0")" && pwd)
size=$1 data=$2 scheme=${SCHEME:-normformer}
shift 2
compgen -G "$data/dict.*.txt" >/dev/null || {
  echo "train_fairseq_mt.sh: DATA: got $data, which holds no dict.LANGUAGE.txt. Make one with" \
    "'normplugin prepare --source TEXTS --target TEXTS --out OUT' and give OUT/fairseq." >&2
  exit 2
}

case $size in
  base) arch=${scheme}_mt lr=7e-4 tokens=4096 updates=100000 warmup=4000
    hardware=(--memory-efficient-fp16 --num-workers 2) ;;
  tiny) arch=${scheme}_mt_tiny lr=1e-3 tokens=2048 updates=20 warmup=5
    hardware=(--cpu --num-workers 0 --log-interval 5 --max-valid-steps 4) ;;
  *) echo "train_fairseq_mt.sh: SIZE: got '$size'; legal are tiny, base." >&2; exit 2 ;;
esac

# --user-dir must be absolute: a relative one may find fairseq's own examples/normformer.
exec "${PYTHON:-python3}" -m fairseq_cli.train "$data" --user-dir "$here" \
  --task translation --arch "$arch" --share-all-embeddings --dropout 0.1 \
  --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
  --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-9 --clip-norm 0.0 \
  --lr $lr --lr-scheduler inverse_sqrt --warmup-updates $warmup --warmup-init-lr 1e-7 \
  --max-tokens $tokens --max-update $updates \
  --save-dir "checkpoints/$arch" "${hardware[@]}" "$@"
