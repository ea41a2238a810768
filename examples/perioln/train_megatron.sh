#!/usr/bin/env bash
# Peri-LN causal language models with Megatron-Core, after arXiv:2502.02732 (ICML 2025).
#
#   train_megatron.sh SIZE DATA [further options of Megatron or normplugin]
#
# SIZE  400m, 1_5b or 3_2b: the paper's sizes, for one node of 8 GPUs.
#       tiny: the same recipe at 4 layers of width 128, a few updates on the CPU (two processes, TP=2,
#       Megatron's own trainer with CUDA emulated), to try the script.
# DATA  the folder that `normplugin prepare` wrote.
# Environment: GPUS per node, TP, PP (the rest is data parallel). On several nodes, run it on each
# with NODES=4 NODE_RANK=0..3 MASTER_ADDR=host MASTER_PORT=port.
# PYTHON chooses the interpreter. What the user adds at the end wins. Run it again to resume.
#
# The paper trained with Megatron-LM on 30B tokens: RMSNorm, 8192 tokens a sequence, 256 sequences
# an update, cosine decay, learning rate 2e-3, weight decay 0.033. README.md says what is not known.
set -euo pipefail

usage() { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "train_megatron.sh: $*" >&2; exit 2; }
[ $# -ge 2 ] || usage
size=$1 data=$2 python=${PYTHON:-python3}
shift 2
[ -f "$data/spm.model" ] && [ -f "$data/megatron/train_text_document.bin" ] || fail \
  "DATA: got $data, which holds no spm.model or megatron/train_text_document.bin." \
  "Make one with 'normplugin prepare TEXT --out DATA'."

case $size in
  tiny) gpus=2 tp=2 micro=8 sequences=8 updates=20 ;;
  400m) gpus=8 tp=1 micro=4 sequences=256 updates=14400 ;;
  1_5b) gpus=8 tp=2 micro=4 sequences=256 updates=14400 ;;
  3_2b) gpus=8 tp=4 micro=4 sequences=256 updates=14400 ;;
  *) fail "SIZE: got '$size'; legal are tiny, 400m, 1_5b, 3_2b." ;;
esac
gpus=${GPUS:-$gpus} tp=${TP:-$tp} pp=${PP:-1} nodes=${NODES:-1}
[ $((gpus * nodes % (tp * pp))) = 0 ] || fail \
  "TP, PP: got $tp, $pp for $nodes x $gpus GPUs, which their product does not divide. Change one."

if [ "$size" = tiny ]; then
  window=128 save=20
  hardware=(--cpu-emulation --eval-interval 10 --eval-iters 2 --log-interval 5)
else
  window=8192 save=500
  hardware=(--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations --eval-interval 500 --eval-iters 50 --log-interval 10)
fi
[ "$tp" = 1 ] || hardware+=(--sequence-parallel)
shape=$("$python" -c "
from normplugin.presets import CAUSAL_SIZES
d = CAUSAL_SIZES['_$size']
print('--num-layers', d.n_layers, '--hidden-size', d.d_model, '--ffn-hidden-size', d.d_ffn,
      '--num-attention-heads', d.n_heads)")

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with TP
# shellcheck disable=SC2086 # the shape is several words
exec "$python" -m torch.distributed.run --nproc-per-node "$gpus" --nnodes "$nodes" \
  --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29500}" -m normplugin.megatron_plugin.pretrain_gpt \
  --norm-scheme periln --norm-type rmsnorm --norm-eps 1e-6 \
  $shape --seq-length $window --max-position-embeddings $window --position-embedding-type rope \
  --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" \
  --train-data-path "$data/megatron/train_text_document" \
  --valid-data-path "$data/megatron/valid_text_document" \
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/spm.model" \
  --hidden-dropout 0.0 --attention-dropout 0.0 \
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.033 --clip-grad 1.0 \
  --lr 2e-3 --min-lr 0 --lr-decay-style cosine --lr-warmup-iters $((updates / 10)) \
  --micro-batch-size "$micro" --global-batch-size "$sequences" --train-iters "$updates" \
  --save "checkpoints/periln_${size}_megatron" \
  --load "checkpoints/periln_${size}_megatron" --save-interval $save \
  "${hardware[@]}" "$@"
