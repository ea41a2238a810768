#!/usr/bin/env bash
# Peri-LN causal language models with fairseq, after arXiv:2502.02732 (ICML 2025).
#
#   train_fairseq.sh SIZE DATA [further fairseq-train options]
#
# SIZE  400m, 1_5b or 3_2b: the paper's sizes, for one node of 8 GPUs.
#       tiny: the same recipe at 4 layers of width 128, a few updates on the CPU, to try the script.
# DATA  the fairseq folder of `normplugin prepare`.
# PYTHON chooses the interpreter. What the user adds at the end wins.
#
# The paper trained with Megatron-LM on 30B tokens: RMSNorm, 8192 tokens a sequence, 256 sequences
# an update, cosine decay, learning rate 2e-3, weight decay 0.033. README.md says what is not known.
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

# 8 GPUs x sequences x update-freq = 256 sequences
case $size in
  tiny) sequences=8 frequency=1 updates=20 ;;
  400m) sequences=4 frequency=8 updates=14400 ;;
  1_5b) sequences=2 frequency=16 updates=14400 ;;
  3_2b) sequences=1 frequency=32 updates=14400 ;;
  *) echo "train_fairseq.sh: SIZE: got '$size'; legal are tiny, 400m, 1_5b, 3_2b." >&2; exit 2 ;;
esac
if [ "$size" = tiny ]; then
  window=128 warmup=1
  hardware=(--cpu --num-workers 0 --log-interval 5 --max-valid-steps 4)
else
  window=8192 warmup=$((updates / 10))
  # Not fully_sharded: it flattens the parameters, and no norm could be spared from weight decay.
  hardware=(--memory-efficient-fp16 --checkpoint-activations --ddp-backend legacy_ddp
    --num-workers 2)
fi

# --user-dir must be absolute: see README.md, troubleshooting.
exec "${PYTHON:-python3}" -m fairseq_cli.train "$data" --user-dir "$here" \
  --task language_modeling --sample-break-mode none --tokens-per-sample $window \
  --arch "periln_$size" --norm-type rmsnorm --norm-eps 1e-6 --share-decoder-input-output-embed \
  --dropout 0.0 --attention-dropout 0.0 \
  --optimizer adam_decay_exempt --adam-betas '(0.9, 0.95)' --weight-decay 0.033 --clip-norm 1.0 \
  --lr 2e-3 --lr-scheduler cosine --warmup-updates $warmup \
  --warmup-init-lr 1e-7 --max-update "$updates" --min-lr 0 \
  --batch-size $sequences --update-freq $frequency \
  --save-dir "checkpoints/periln_$size" \
  "${hardware[@]}" "$@"
