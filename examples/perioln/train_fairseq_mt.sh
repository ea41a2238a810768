#!/usr/bin/env bash
# Peri-LN in the recipe of ../normformer/train_fairseq_mt.sh, whose arguments it takes.
SCHEME=${SCHEME:-periln} exec "$(dirname "$0")/../normformer/train_fairseq_mt.sh" "$@"
