#!/usr/bin/env bash
# NormFormer causal language models with fairseq, the recipes of arXiv:2110.09456.
#
#   train_fairseq.sh SIZE DATA [further fairseq-train options]
#
# SIZE  125m, 355m, 1_3b or 2_7b: the paper's runs, for one node of 8 GPUs.
#       tiny: the same recipe at 4 layers of width 128, a few updates on the CPU, to try the script.
# DATA  the fairseq folder of `normplugin prepare`.
# PYTHON chooses the interpreter. What the user adds at the end wins.
#
# Source: fairseq's examples/normformer/train_lm.sh and README. The head scale stands before the
# output projection, as in the paper (fairseq's script scaled after it: --head-scale after-out-proj).
set -euo pipefail

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
here=$(cd "$(dirname "$0")" && pwd)
size=$1 data=$2
shift 2
[ -f "$data/dict.txt" ] || {
  echo "train_fairseq.sh: DATA: got $data, which holds no dict.txt. Make one with" \
    "'normplugin prepare TEXT --out OUT' and give OUT/fairseq." >&2
  exit 2
}

#           lr    sequences/GPU  update-freq  updates  dropout  further
case $size in
  tiny) set -- 3e-3  8  1       20  0.1  --residual-scale -- "$@" ;;
  125m) set -- 3e-3 16  2  572204  0.1  --residual-scale -- "$@" ;;
  355m) set -- 1e-3 16  2  572204  0.0  --residual-scale -- "$@" ;;
  1_3b) set -- 6e-4  4 16  286102  0.1  -- "$@" ;; # ResScale hurts from 1.3B on
  2_7b) set -- 6e-4  4 16  286102  0.1  --activation-fn relu_squared -- "$@" ;;
  *) echo "train_fairseq.sh: SIZE: got '$size'; legal are tiny, 125m, 355m, 1_3b, 2_7b." >&2; exit 2 ;;
esac
lr=$1 sequences=$2 frequency=$3 updates=$4 dropout=$5
shift 5
recipe=()
while [ "$1" != -- ]; do recipe+=("$1"); shift; done
shift

if [ "$size" = tiny ]; then
  window=128 warmup=5
  hardware=(--cpu --num-workers 0 --log-interval 5 --max-valid-steps 4)
else
  window=2048 warmup=750
  hardware=(--memory-efficient-fp16 --fp16-init-scale 4 --checkpoint-activations
    --ddp-backend fully_sharded --num-workers 2)
fi

# --user-dir must be absolute: a relative one may find fairseq's own examples/normformer.
exec "${PYTHON:-python3}" -m fairseq_cli.train "$data" --user-dir "$here" \
  --task language_modeling --sample-break-mode none --tokens-per-sample $window \
  --arch "normformer_$size" --share-decoder-input-output-embed \
  --dropout "$dropout" --attention-dropout "$dropout" \
  --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --weight-decay 0.01 --clip-norm 0.0 \
  --lr "$lr" --lr-scheduler polynomial_decay --warmup-updates $warmup \
  --total-num-update "$updates" --max-update "$updates" \
  --batch-size "$sequences" --update-freq "$frequency" \
  --save-dir "checkpoints/normformer_$size" \
  "${hardware[@]}" "${recipe[@]}" "$@"
