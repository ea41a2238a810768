#!/usr/bin/env bash
# Masked language models with fairseq, in RoBERTa's recipe.
#
#   train_fairseq_mlm.sh SIZE DATA [further fairseq-train options]
#
# SIZE  base (the shape of the paper's Table 3) or large, for one node of 8 GPUs.
#       tiny: the same recipe at 4 layers of width 128, a few updates on the CPU, to try the script.
# DATA  the fairseq folder of `normplugin prepare`.
# SCHEME chooses the placement (preln for the baseline), PYTHON the interpreter. What the user adds
# at the end wins.
#
# Source: fairseq's examples/roberta/README.pretraining.md; the paper's own updates, batch and
# learning rate for masked LM are not known. Departs: windows run across documents.
set -euo pipefail

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
here=$(cd "$(dirname "$0")" && pwd)
size=$1 data=$2 scheme=${SCHEME:-normformer}
shift 2
[ -f "$data/dict.txt" ] || {
  echo "train_fairseq_mlm.sh: DATA: got $data, which holds no dict.txt. Make one with" \
    "'normplugin prepare TEXT --out OUT' and give OUT/fairseq." >&2
  exit 2
}

hardware=(--memory-efficient-fp16 --num-workers 2)
case $size in
  base) arch=${scheme}_mlm lr=5e-4 ;;
  large) arch=${scheme}_mlm_large lr=4e-4 hardware+=(--checkpoint-activations) ;;
  tiny) arch=${scheme}_mlm_tiny lr=1e-3 hardware=(--cpu --num-workers 0 --log-interval 5
    --max-valid-steps 4) ;;
  *) echo "train_fairseq_mlm.sh: SIZE: got '$size'; legal are tiny, base, large." >&2; exit 2 ;;
esac
if [ "$size" = tiny ]; then
  window=128 sequences=8 frequency=1 updates=20 warmup=5
else # 8 GPUs x 16 x 16 = 2048 sequences
  window=512 sequences=16 frequency=16 updates=125000 warmup=10000
fi

# --user-dir must be absolute: a relative one may find fairseq's own examples/normformer.
exec "${PYTHON:-python3}" -m fairseq_cli.train "$data" --user-dir "$here" \
  --task masked_lm --criterion masked_lm --sample-break-mode none --tokens-per-sample $window \
  --arch "$arch" --max-positions $window --dropout 0.1 --attention-dropout 0.1 \
  --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 0.0 \
  --lr $lr --lr-scheduler polynomial_decay --warmup-updates $warmup \
  --total-num-update $updates --max-update $updates \
  --batch-size $sequences --update-freq $frequency \
  --save-dir "checkpoints/$arch" "${hardware[@]}" "$@"
