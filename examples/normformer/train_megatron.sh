#!/usr/bin/env bash
# NormFormer causal language models with Megatron-Core, the recipes of arXiv:2110.09456.
#
#   train_megatron.sh SIZE DATA [further options of Megatron or normplugin]
#
# SIZE  125m, 355m, 1_3b or 2_7b: the paper's runs, for one node of 8 GPUs.
#       tiny: the same recipe at 4 layers of width 128, a few updates on the CPU (two processes, TP=2,
#       Megatron's own trainer with CUDA emulated), to try the script.
# DATA  the folder that `normplugin prepare` wrote.
# Environment: GPUS per node, TP, PP (the rest is data parallel). On several nodes, run it on each
# with NODES=4 NODE_RANK=0..3 MASTER_ADDR=host MASTER_PORT=port.
# PYTHON chooses the interpreter. What the user adds at the end wins. Run it again to resume.
#
# Source: fairseq's examples/normformer/train_lm.sh and README, in Megatron's options. Departs: bf16
# for fp16; learned positions; Megatron spares biases, gains and scales from weight decay.
set -euo pipefail

usage() { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "train_megatron.sh: $*" >&2; exit 2; }
[ $# -ge 2 ] || usage
size=$1 data=$2 python=${PYTHON:-python3}
shift 2
[ -f "$data/spm.model" ] && [ -f "$data/megatron/train_text_document.bin" ] || fail \
  "DATA: got $data, which holds no spm.model or megatron/train_text_document.bin." \
  "Make one with 'normplugin prepare TEXT --out DATA'."

# GPUs TP  lr  sequences/GPU  sequences  updates  dropout  further. Sequences: 0.5M or 1M tokens.
case $size in
  tiny) set -- 2 2 3e-3  8   8     20  0.1  --residual-scale -- "$@" ;;
  125m) set -- 8 1 3e-3 16 256 572204  0.1  --residual-scale -- "$@" ;;
  355m) set -- 8 1 1e-3 16 256 572204  0.0  --residual-scale -- "$@" ;;
  1_3b) set -- 8 2 6e-4  4 512 286102  0.1  -- "$@" ;; # ResScale hurts from 1.3B on
  2_7b) set -- 8 4 6e-4  4 512 286102  0.1  --squared-relu -- "$@" ;;
  *) fail "SIZE: got '$size'; legal are tiny, 125m, 355m, 1_3b, 2_7b." ;;
esac
gpus=${GPUS:-$1} tp=${TP:-$2} pp=${PP:-1} nodes=${NODES:-1}
lr=$3 micro=$4 sequences=$5 updates=$6 dropout=$7
shift 7
recipe=()
while [ "$1" != -- ]; do recipe+=("$1"); shift; done
shift
[ $((gpus * nodes % (tp * pp))) = 0 ] || fail \
  "TP, PP: got $tp, $pp for $nodes x $gpus GPUs, which their product does not divide. Change one."

if [ "$size" = tiny ]; then
  window=128 warmup=5 save=20
  hardware=(--cpu-emulation --eval-interval 10 --eval-iters 2 --log-interval 5)
else
  window=2048 warmup=750 save=1000
  hardware=(--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations --eval-interval 1000 --eval-iters 50 --log-interval 10)
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
  --norm-scheme normformer $shape --seq-length $window --max-position-embeddings $window \
  --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" \
  --train-data-path "$data/megatron/train_text_document" \
  --valid-data-path "$data/megatron/valid_text_document" \
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/spm.model" \
  --hidden-dropout "$dropout" --attention-dropout "$dropout" \
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.98 --adam-eps 1e-8 --weight-decay 0.01 \
  --clip-grad 0.0 --lr "$lr" --lr-decay-style linear --lr-warmup-iters $warmup \
  --micro-batch-size "$micro" --global-batch-size "$sequences" --train-iters "$updates" \
  --save "checkpoints/normformer_${size}_megatron" \
  --load "checkpoints/normformer_${size}_megatron" --save-interval $save \
  "${hardware[@]}" "${recipe[@]}" "$@"
